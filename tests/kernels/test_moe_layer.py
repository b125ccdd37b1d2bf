"""A mixture-of-experts layer on the GPU platform, compared with plain torch."""

from __future__ import annotations

import pytest
import torch

from paged_backend.checkpoint.moe import (
    GPT_OSS_NAMES,
    MoeShape,
    Routing,
    Scoring,
    SharedExpert,
    SwiGLU,
)
from paged_backend.models.moe import MoeMLP
from paged_backend.platforms.cpu.torch_platform import TorchPlatform
from paged_backend.platforms.gpu.platform import GpuPlatform
from paged_backend.platforms.select import gpu_of

SIZES = {"hidden_size": 48, "num_experts": 6, "intermediate_size": 20}
SHAPES = {
    "qwen2_moe": MoeShape(**SIZES, routing=Routing(3), shared_expert=SharedExpert(28, gated=True)),
    "shared": MoeShape(**SIZES, routing=Routing(2), shared_expert=SharedExpert(28)),
    "sigmoid": MoeShape(**SIZES, routing=Routing(2, Scoring.SIGMOID, norm_topk_prob=True)),
    "gpt_oss": MoeShape(
        **SIZES,
        routing=Routing(2, Scoring.SOFTMAX_OF_TOP),
        names=GPT_OSS_NAMES,
        activation=SwiGLU(1.702, 7.0, 1.0),
        bias=True,
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_equals_plain_torch(name: str, device: torch.device) -> None:
    moe = SHAPES[name]
    gpu = GpuPlatform(device, torch.float32, gpu_of(device))
    layers = [MoeMLP(moe, "", kernels) for kernels in (gpu, TorchPlatform(torch.float32))]
    places, wanted_places = (layer.parameters() for layer in layers)
    assert places.keys() == wanted_places.keys()
    for key, place in places.items():
        assert isinstance(place, torch.Tensor)
        wanted_places[key].copy_(place.normal_(0, 0.2))
    for layer in layers:
        layer.pack()
    x = torch.randn(9, 48)
    out, wanted = layers[0](x.to(device)), layers[1](x)
    torch.testing.assert_close(out.cpu(), wanted, rtol=2e-5, atol=2e-5)
    total = torch.ones(9, 48, device=device)
    layers[0].add_to(total, x.to(device))
    torch.testing.assert_close(total.cpu(), wanted + 1, rtol=2e-5, atol=2e-5)
