"""The models with merged adapters, with which the GPU's engine is compared, beside peft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lora_oracle import LoraOracle


# peft uses a deprecated property of transformers.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_merged_models_equal_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    oracle = LoraOracle("qwen2", tmp_path, num_hidden_layers=2, intermediate_size=40)
    tokens = torch.tensor([[3, 50, 120, 7, 66]])
    for name, folder in oracle.modules.items():
        model = peft.PeftModel.from_pretrained(oracle.models[""].model, folder)
        with torch.inference_mode():
            expected = model(tokens).logits
            assert torch.allclose(oracle.models[name].model(tokens).logits, expected, atol=1e-4)
        model.unload()
