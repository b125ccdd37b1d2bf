from __future__ import annotations

import pytest
import torch

from paged_backend.platforms.portable.threads import one_torch_thread


def test_threads_come_back_even_after_an_error() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError), one_torch_thread():
            assert torch.get_num_threads() == 1
            raise RuntimeError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
