"""Checks every family of `checkpoints` beside transformers, and prints docs/models.md.

Run it as ``.venv/bin/python tests/models_page.py > docs/models.md``; it takes some minutes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from checkpoints import FALLBACKS, FAMILIES
from encoders import ENCODERS, KINDS, confirm, embed, encoder_engine, make_encoder, make_prompts
from scenarios import SCENARIOS, Case
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from paged_backend.engine.worker import Worker
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError

ROOT = Path(__file__).parents[1]
# Models of transformers that are known not to work, by their types; with what their sizes need.
REFUSED: dict[str, dict[str, Any]] = {
    "rwkv": {},
    "diffllama": {},
}
TINY = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD = """# Supported models

`tests/models_page.py` has written this page. For each row it made a small checkpoint with random
weights and the whole structure of the model, and compared greedy tokens with the tokens of
transformers in float32, token for token:

- **batch**: 32 mixed requests at once;
- **chunks**: a budget of tokens that cuts every prompt;
- **prefix hits**: prompts that share full and partial blocks with an earlier one;
- **preemption**: a pool that is too small for all sequences.

`PAGED_FAMILIES=all pytest tests/integration/test_families_served.py` serves each of them through
tritonserver, and kills its engine within an answer.
"""
NATIVE = """
## Families with our implementation

They run on a CPU, on a GPU, quantized ([formats](quantization.md)), and as embedding models. A
variant of a family has a separate row if it uses other parts of the code.
"""
LATENT = """
DeepSeek, GLM-4 MoE Lite, MiniCPM3 and Kimi Linear have latent attention: a layer keeps one row for
each token, the latent vector and the rotary key, and the up-projections of keys and values
(`kv_b_proj`) are absorbed into queries and results. So DeepSeek-V3 keeps 70,272 bytes a token in
bfloat16; with the keys and values of all heads it would be 4,997,120. `kv_b_proj` is dense in
memory, whatever its format in the checkpoint, and cannot have an adapter. The KV cache has 16 or 32
bits, not 8. Ranks divide the heads, and each keeps whole rows.
"""
WHOLE_MODELS = """
Checkpoints that also read images or sounds are served for their texts: those of Gemma 3 and 4,
Llama 4, LFM2-VL, LLaVA, Mistral Small 3, Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen 3.5 and SmolVLM,
which `architectures` names `...ForConditionalGeneration`. The section `text_config` then describes
the model, weights of the other parts are not loaded, and requests with an image are refused. A log
line says so. Multi-token prediction (MTP) layers are only loaded for
[speculation](speculation.md#an-mtp-layer).
"""
CHUNKS = """
Most layers of Llama 4 attend within chunks of `attention_chunk_size` tokens; the other layers
attend to all earlier tokens and have no rotary embedding. Blocks of earlier chunks are freed,
and after a prefix hit only those of the chunk that goes on must be cached, none at the start of a
chunk. The weights of experts are factors on what they read. With `use_qk_norm`, the rotary
embedding may be scaled as `linear`, `dynamic` or `llama3` only.
"""
SHAPES = """
The layers of Gemma 4 have several shapes: those with full attention have other heads, and the last
layers may read what an earlier layer keeps. The KV cache counts what each layer keeps, and a block
has room for the group of layers that keeps most. Layers that share keys and values keep nothing,
and compute queries only. Ranks divide the heads; models with inputs of layers or shared keys and
values have one pipeline stage. With `enable_moe_block`, a layer has experts beside its MLP, and
both read different norms of the same hidden states. The kernels of a GPU read heads of up to 512
numbers, which the published models have in layers with full attention. No device has run it yet.
"""
STATES = """
Hybrids (Qwen3-Next, Qwen 3.5, LFM2, Granite 4, Bamba, Falcon-H1, Nemotron-H, OLMo Hybrid, Jamba,
Kimi Linear, MiniMax, RecurrentGemma, Zamba 2) have layers that keep one state for each sequence, of
a size that does not grow with the text. States have slots in a pool, which takes at most half of
the cache's memory. The prefix cache keeps the state after every `mamba_block_size` tokens, at the
end of prompts, and where a prompt leaves an earlier one ([options](options.md)). A prefix counts as
cached up to the last state that is still there. On a GPU in 16 bits, Mamba-2, lightning attention
and the delta rule with a decay for each head compute prompts in chunks of 64 tokens. The other
layers compute them token by token, and so do all in float32, which takes long. Neither has been
measured. Ranks divide states like heads ([parallel.md](parallel.md#models)). After a wrong guess, a
step repeats the right ones ([speculation.md](speculation.md#models-with-states)). A hybrid cannot
be a draft model.

Mamba, Falcon Mamba and Mamba-2 only have such layers. States may then take all of the cache's
memory. Blocks still count tokens for the prefix cache, but take no memory, so that there are enough
for the longest sequences with states in all slots, up to 131,072. `max_model_len` is 1,048,576 by
default, unless `config.json` has `max_position_embeddings`. `kv_cache_dtype` must be `auto`. Hidden
states have the model's dtype on a GPU and float32 on a CPU, whatever `residual_in_fp32` says.

Zamba 2 has Mamba-2 in all layers. Before it, some layers use one of a few blocks of attention and
an MLP, which read hidden states beside embeddings, with other adapters in each layer. The blocks
are in memory once. Such models have one pipeline stage, and no LoRA adapters. `use_long_context`,
and blocks that are not shared (`tie_word_embeddings` false), are refused.
"""
FALLBACK = """
## Models that transformers computes

`model_impl` ([options](options.md)) is `transformers` for them, by default. Attention goes through
the paged KV cache. On a CPU, linear layers are our products; experts are not. Quantized checkpoints
of these models and embeddings are not supported, and their steps run without graphs. Biases of
positions (ALiBi: BLOOM, MPT, some of Falcon) are 8 more numbers of each key, and 8 bits cannot hold
them, so the KV cache has 16 or 32 bits. Other
causal language models of transformers may also work: before such a model serves, its logits are
compared with the logits of its own attention, and a model that fails is refused.
"""
ENCODER = """
## Encoders

transformers also computes them, and they make [embeddings](protocols.md#embeddings): pooled by the
mean, the first token (cls) or the last one. Each row was compared with transformers in float32, to
1e-5, in a batch of 12 prompts and in smaller ones. A step computes whole prompts, without a KV
cache. Code in a checkpoint is never run, and quantized checkpoints are not supported.
"""
SIZES = """
## Context length

`max_model_len` is by default the length that `config.json` gives, and may be lower; the default of
LongRoPE is the original length instead, see below. The length is
`max_position_embeddings`, unless the type of scaling in `rope_scaling` or `rope_parameters` (there
`type` or `rope_type`) changes it:

| type | length |
|---|---|
| `linear`, `yarn` | `factor` times the original length |
| `dynamic` | the same: longer sequences are refused, because their frequencies would change |
| `llama3`, `longrope`, `su` | the same, as it includes the scaling |

The original length is `original_max_position_embeddings`, or else `max_position_embeddings`. A
`max_position_embeddings` that includes the scaling, or is below the original length, counts itself;
Gemma 3 always does.

LongRoPE (`longrope`, `su`: Phi-3 mini 128k, Phi-3.5, Phi-4 mini) has two sets of frequencies. Up to
the original length, which is the default, the short ones are used, as transformers does for short
texts. With a longer `max_model_len` the long ones are used for all sequences, because the keys in
the cache cannot change when a sequence grows, and answers to short prompts differ a little. For a
model that transformers computes, the original length is the limit: its frequencies beyond depend on
the batch.

Encoders end at the `max_seq_length` of
sentence-transformers, or else, if their positions are absolute, at the `model_max_length` of the
tokenizer.

## Sizes and names

Sizes in `config.json` have limits: 1,024 layers, 4,096 experts of a layer and 131,072 of a model,
4,096 heads of 4,096 numbers, a `hidden_size` of 2^18, an MLP of 2^22, 2^23 tokens, and 2^24
positions. They are compared with the headers of the weights before memory is taken for the model.
If `tie_word_embeddings` is true and the files hold a `lm_head.weight` that differs from the
embedding, it is used, as in transformers, and a warning is logged. Tied weights may also be stored
as `lm_head.weight` alone. `silu` and `swish` are one
activation, and so are `gelu_pytorch_tanh`, `gelu_new`, `gelu_fast`,
`gelu_accurate` and `gelu_python_tanh`.
"""
REFUSALS = """
## Models that are refused

| type | message |
|---|---|
"""

TEXTS = (
    HEAD,
    NATIVE,
    WHOLE_MODELS,
    CHUNKS,
    LATENT,
    SHAPES,
    STATES,
    FALLBACK,
    ENCODER,
    SIZES,
    REFUSALS,
)


def main() -> None:
    """Print the page."""
    print(HEAD + NATIVE)
    print("\n".join(_table(FAMILIES)))
    print(WHOLE_MODELS + CHUNKS + LATENT + SHAPES + STATES + FALLBACK)
    print("\n".join(_table(FALLBACKS)))
    print(ENCODER)
    print("\n".join(_encoders()))
    print(SIZES + REFUSALS + "\n".join(_refusals()))


def _table(families: tuple[str, ...]) -> Iterator[str]:
    yield "| model | architecture | batch | chunks | prefix hits | preemption |"
    yield "|---|---|---|---|---|---|"
    for family in families:
        with TemporaryDirectory() as folder:
            case = Case(family, Path(folder))
            names = json.loads((Path(folder) / "config.json").read_text())["architectures"]
            marks = [_passes(scenario, case) for scenario in SCENARIOS]
        yield f"| {family} | `{names[0]}` | {' | '.join(marks)} |"


def _encoders() -> Iterator[str]:
    yield "| model | class in transformers | mean | cls | last |"
    yield "|---|---|---|---|---|"
    for family in ENCODERS:
        with TemporaryDirectory() as folder:
            model = make_encoder(family, Path(folder))
            marks = [_embeds(model, Path(folder), kind) for kind in KINDS]
        yield f"| {family} | `{type(model).__name__}` | {' | '.join(marks)} |"


def _embeds(model: PreTrainedModel, folder: Path, kind: str) -> str:
    engine, prompts = encoder_engine(folder, pooling_type=kind), make_prompts(12)
    try:
        for batch in (prompts, prompts[7:8], prompts[::-4]):
            confirm(model, batch, embed(engine, batch), kind)
    except AssertionError:
        return "no"
    return "yes"


def _passes(scenario: Callable[[Case], None], case: Case) -> str:
    try:
        scenario(case)
    except AssertionError:
        return "no"
    return "yes"


def _refusals() -> Iterator[str]:
    for family, sizes in sorted(REFUSED.items()):
        with TemporaryDirectory() as folder:
            AutoConfig.for_model(family, **{**TINY, **sizes}).save_pretrained(folder)
            _name_the_architecture(Path(folder) / "config.json", family)
            config = EngineConfig(model=folder, load_format="dummy", dtype="float32")
            try:
                Worker(config, Path(folder))
            except ConfigError as error:
                yield f"| {family} | {str(error).replace(folder + '/', '')} |"
            else:
                raise SystemExit(f"{family} is not refused")


def _name_the_architecture(path: Path, family: str) -> None:
    values = json.loads(path.read_text())
    values["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    path.write_text(json.dumps(values))


if __name__ == "__main__":
    os.environ["TQDM_DISABLE"] = "1"
    sys.exit(main())
