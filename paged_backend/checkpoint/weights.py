"""Weights of a checkpoint, each tensor copied straight to its place in the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from paged_backend.checkpoint.gguf.source import GgufTensors
from paged_backend.checkpoint.hub import is_gguf
from paged_backend.checkpoint.safetensors_files import SafetensorsFiles
from paged_backend.checkpoint.shares import Share, Shares
from paged_backend.checkpoint.stages import Stage
from paged_backend.checkpoint.stored_tensor import FLOATS, Parameter, StoredTensor
from paged_backend.checkpoint.tensor_names import is_ignored, targets, usual_name
from paged_backend.checkpoint.tensor_source import SourceTensor, TensorSource
from paged_backend.checkpoint.tensors import Role, Tensors
from paged_backend.values.errors import ConfigError

BAR_AFTER_S = 1.0  # a load that ends sooner shows no progress bar

# The weights with which a norm only scales rows to a root mean square of 1.
_FILLS = {Role.NORM: 1.0, Role.OFFSET_NORM: 0.0}


def load_weights(
    checkpoint: Path,
    parameters: Mapping[str, Parameter],
    shares: Shares | None = None,
    stage: Stage | None = None,
    is_needed: Callable[[str], bool] = lambda name: True,
) -> None:
    """Fill every parameter from the checkpoint's tensor of that name, with a progress bar.

    Args:
        checkpoint: a folder of safetensors files, or a GGUF file.
        parameters: the memory that a tensor belongs in, by the tensor's name. It has the shape of
            the tensor, or of its share; the dtype may differ. Optional ones may be missing.
        shares: what this rank has of the tensors that are divided; None for a model without ranks.
        stage: the part of the model that this rank has; None for all of it.
        is_needed: returns False for the name of a tensor that the model does without.

    Raises:
        ConfigError: a file or tensor is missing, damaged, unknown, or of the wrong shape.
    """
    source = _open(checkpoint)
    missing = {name for name, parameter in parameters.items() if not _is_optional(parameter)}
    # Under the launcher stderr is a pipe to it, so tqdm cannot see whether there is a terminal: the
    # launcher sets TQDM_DISABLE if not.
    with tqdm(
        total=source.num_bytes, desc="Loading weights", unit="B", unit_scale=True, delay=BAR_AFTER_S
    ) as bar:
        for entry in source:
            bar.update(entry.num_bytes)
            names = targets(entry.name, parameters)
            is_elsewhere = _is_elsewhere(entry.name, shares, stage)
            is_known = is_elsewhere or is_ignored(entry.name) or not is_needed(entry.name)
            if not names and not is_known:
                raise ConfigError(f"{entry.origin} has no place in this architecture")
            for name in names:
                _fill(parameters[name], _shared(entry, parameters[name], (shares or {}).get(name)))
            missing.difference_update(names)
    if missing:
        raise ConfigError(
            f"{checkpoint}: {_count(missing)} missing, such as {min(missing)}; config.json does "
            "not fit the safetensors files, or they are not complete: download them again"
        )


def random_weights(
    parameters: Mapping[str, Parameter], tensors: Tensors, seed: int, shares: Shares | None = None
) -> None:
    """Let norms do nothing, and fill other parameters with seeded numbers of deviation 0.02.

    Args:
        parameters: the memory of each tensor, by its name.
        tensors: what the tensors of the whole model are, by the same names.
        seed: seed of the numbers.
        shares: see `load_weights`; all ranks together have the numbers of a model without ranks.
    """
    device = next(p.device for p in parameters.values() if isinstance(p, Tensor))
    generator = torch.Generator(device).manual_seed(seed)
    for name, spec in tensors.items():
        place = parameters.get(name)
        memory = place if isinstance(place, Tensor) else None
        share = (shares or {}).get(name)
        if memory is not None and share is None and memory.is_contiguous():
            weight = memory
        else:  # this rank has a share or nothing of it; the numbers that follow are the same
            dtype = torch.float32 if memory is None else memory.dtype
            weight = torch.empty(spec.shape, dtype=dtype, device=device)
        if spec.role in _FILLS:
            weight.fill_(_FILLS[spec.role])
        else:
            weight.normal_(0, 0.02, generator=generator)
        if place is not None and place is not weight:
            entry = SourceTensor(name, weight, f"random tensor {name}", weight.nbytes)
            _fill(place, _shared(entry, place, share))


def _open(checkpoint: Path) -> TensorSource:
    return GgufTensors(checkpoint) if is_gguf(checkpoint) else SafetensorsFiles(checkpoint)


def _is_elsewhere(name: str, shares: Shares | None, stage: Stage | None) -> bool:
    """Return whether a tensor belongs to a layer that this rank does not have."""
    if stage is not None and not stage.has(name):
        return True
    share = (shares or {}).get(f"{usual_name(name).rpartition('.')[0]}.weight")
    return share is not None and share.is_elsewhere


def _shared(entry: SourceTensor, parameter: Parameter, share: Share | None) -> SourceTensor:
    """Return a tensor, or this rank's share of it if the parameter has memory for no more."""
    if share is None or (
        isinstance(parameter, StoredTensor) and parameter.kind.shape == share.whole
    ):
        return entry
    tensor = entry.tensor.flatten() if len(share.whole) == 1 else entry.tensor
    return entry._replace(tensor=share.take(tensor)) if tensor.shape == share.whole else entry


def _fill(parameter: Parameter, entry: SourceTensor) -> None:
    tensor, origin = entry.tensor, entry.origin
    if isinstance(parameter, StoredTensor):
        parameter.fill(tensor, origin)
        return
    if tensor.shape != parameter.shape:
        raise ConfigError(
            f"{origin} has shape {list(tensor.shape)}, but config.json asks for "
            f"{list(parameter.shape)}"
        )
    if tensor.dtype not in FLOATS:
        raise ConfigError(f"{origin} is {tensor.dtype}, but config.json says that it is a float")
    parameter.copy_(tensor)


def _is_optional(parameter: Parameter) -> bool:
    return isinstance(parameter, StoredTensor) and parameter.kind.optional


def _count(names: set[str]) -> str:
    return f"{len(names)} tensor{'s are' if len(names) > 1 else ' is'}"
