"""Responses share tensors of equal small values."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from paged_backend.serving.contract import Array, as_strings
from paged_backend.serving.shared_tensors import MAX_BYTES, MAX_TENSORS, SharedTensors


class Tensor:
    """A tensor of the server's interface."""

    def __init__(self, name: str, array: Array) -> None:
        self.name = name
        self.array = array


def new_tensors(arrays: Mapping[str, Array]) -> list[Tensor]:
    return [Tensor(name, array) for name, array in arrays.items()]


@pytest.fixture
def shared() -> SharedTensors[Tensor]:
    return SharedTensors(new_tensors, threading.current_thread())


def one(shared: SharedTensors[Tensor], name: str, array: Array) -> Tensor:
    (tensor,) = shared.make({name: array})
    assert tensor.name == name
    assert np.array_equal(tensor.array, array) and tensor.array.dtype == array.dtype
    assert tensor.array.shape == array.shape
    return tensor


def test_equal_values_of_an_output_share_a_tensor(shared):
    first = shared.make({"text_output": as_strings(["a"]), "num_output_tokens": np.uint32([1])})
    again = shared.make({"num_output_tokens": np.uint32([1]), "text_output": as_strings(["a"])})
    assert again == first[::-1]


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("x", np.uint32([2])),
        ("y", np.uint32([1])),
        ("x", np.int32([1])),
        ("x", np.array(1, np.uint32)),
        ("x", as_strings(["\x01\0\0\0"])),
    ],
)
def test_other_values_names_types_and_shapes_have_tensors_of_their_own(shared, name, array):
    first = one(shared, "x", np.uint32([1]))
    assert one(shared, name, array) is not first
    assert one(shared, "x", np.uint32([1])) is first


@pytest.mark.parametrize("array", [as_strings(["a", "b"]), as_strings([]), as_strings(["a" * 65])])
def test_only_one_small_element_is_shared(shared, array):
    assert one(shared, "x", array) is not one(shared, "x", array)
    assert len(as_strings(["a" * MAX_BYTES])[0]) == 64
    assert one(shared, "x", as_strings(["a" * 64])) is one(shared, "x", as_strings(["a" * 64]))


def test_other_threads_get_new_tensors(shared):
    array = np.uint32([1])
    first = one(shared, "x", array)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(one, shared, "x", array).result() is not first
    assert one(shared, "x", array) is first


def test_the_tensors_that_were_not_used_for_longest_are_released(shared):
    kept, dropped = one(shared, "x", np.int64([-1])), one(shared, "x", np.int64([-2]))
    for number in range(MAX_TENSORS - 1):
        one(shared, "x", np.int64([number]))
        assert one(shared, "x", np.int64([-1])) is kept
    assert one(shared, "x", np.int64([-2])) is not dropped
    shared.close()
    assert one(shared, "x", np.int64([-1])) is not kept
