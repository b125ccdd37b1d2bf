"""Linear layers with int8 weights on a device, beside their reference in torch."""

from __future__ import annotations

import pytest
import torch

from paged_backend.models.linear import LinearSpec
from paged_backend.platforms.gpu.int8_linear import TritonInt8Linear
from paged_backend.platforms.torch.int8_linear import TorchInt8Linear


@pytest.mark.parametrize("rows", [1, 5, 17])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_reference(device, rows, bias):
    spec = LinearSpec(70, {"q": 33, "k": 20}, bias=bias)
    linear, reference = (
        kind(spec, torch.float32, torch.device(device))
        for kind in (TritonInt8Linear, TorchInt8Linear)
    )
    places = linear.parameters()
    for name, parameter in reference.parameters().items():
        if parameter.dtype == torch.int8:
            parameter.random_(-128, 128)
        else:
            parameter.uniform_(0.001, 0.1)
        places[name].copy_(parameter)
    x = torch.randn(rows, 70, device=device)
    # Values in the middle between two integers may be rounded differently: a step of one value.
    torch.testing.assert_close(linear(x), reference(x), atol=0.3, rtol=1e-4)
    exact = torch.randint(-126, 127, (rows, 70), device=device).float()
    exact[:, 0] = 127.0
    torch.testing.assert_close(linear(exact), reference(exact), atol=1e-3, rtol=1e-5)
