"""gpt-oss: experts in each layer, windows in every other one, and a sink for each head."""

from __future__ import annotations

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.keys import last_of_each, layer_types, windows_of
from paged_backend.checkpoint.moe_reader import read_gpt_oss
from paged_backend.checkpoint.shape import Biases, Variant


def gpt_oss(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a gpt-oss checkpoint."""
    attention = config.flag("attention_bias", True)
    return Variant(
        biases=Biases(qkv=attention, output=attention),
        windows=windows_of(config, layer_types(config, last_of_each(2, num_layers)), default=128),
        sinks=True,
        moe=read_gpt_oss(config),
    )
