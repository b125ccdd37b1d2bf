"""Weights from safetensors files, each tensor copied straight to its place in the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from paged_backend.checkpoint.stored_tensor import FLOATS, Parameter, StoredTensor
from paged_backend.checkpoint.tensors import Role, Tensors
from paged_backend.errors import ConfigError
from paged_backend.json_file import read_json_object
from paged_backend.validation import shorten

BAR_AFTER_S = 1.0  # a load that ends sooner shows no progress bar

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLED = ("*.bin", "*.pt", "*.pth")
# Tensors of a checkpoint that a model may not need: a tied output layer, rotary tables.
_IGNORED = ("lm_head.weight", "rotary_emb.inv_freq")
_QUERY_SCALES = re.compile(r".*\.self_attn\.(?:q_proj\.output|(?:attn\.)?(?:q|prob))_scale")
# The names of the scales of keys and values in checkpoints of different tools.
_KV_SCALES = re.compile(
    r"(?P<layer>.*\.self_attn)\.(?:(?P<proj>[kv])_proj\.(?:output|[kv])|(?:attn\.)?(?P<own>[kv]))_scale"
)


def load_weights(folder: Path, parameters: Mapping[str, Parameter]) -> None:
    """Fill every parameter from the checkpoint's tensor of that name, with a progress bar.

    `parameters` maps a tensor's name to the memory it belongs in, of the same shape; the dtype may
    differ. Optional parameters may be missing.

    Raises:
        ConfigError: a file or tensor is missing, damaged, unknown, or of the wrong shape.
    """
    files = weight_files(folder)
    missing = {name for name, parameter in parameters.items() if not _is_optional(parameter)}
    total = sum(file.stat().st_size for file in files)
    # Under the launcher stderr is a pipe to it, so tqdm cannot see whether there is a terminal: the
    # launcher sets TQDM_DISABLE if not.
    with tqdm(
        total=total, desc="Loading weights", unit="B", unit_scale=True, delay=BAR_AFTER_S
    ) as bar:
        for file, name, tensor in _tensors(files):
            bar.update(tensor.nbytes)
            name = _usual_name(name)
            if name in parameters or not _is_ignored(name):
                _fill(parameters, f"{file}: tensor {shorten(name, 200, quote=False)}", name, tensor)
            missing.discard(name)
    if missing:
        raise ConfigError(
            f"{folder}: {_count(missing)} missing, such as {min(missing)}; config.json does not "
            "fit the safetensors files, or they are not complete: download them again"
        )


def random_weights(parameters: Mapping[str, Parameter], tensors: Tensors, seed: int) -> None:
    """Fill norms with 1 and the other parameters with seeded random numbers of deviation 0.02.

    Args:
        parameters: the memory of each tensor, by its name.
        tensors: what the tensors are, by the same names.
        seed: of the numbers.
    """
    device = next(p.device for p in parameters.values() if isinstance(p, Tensor))
    generator = torch.Generator(device).manual_seed(seed)
    for name, spec in tensors.items():
        parameter = parameters[name]
        if isinstance(parameter, Tensor):
            weight = parameter
        else:
            weight = torch.empty(spec.shape, device=device)
            parameter.fill(weight, f"random tensor {name}")
        if spec.role is Role.NORM:
            weight.fill_(1)
        else:
            weight.normal_(0, 0.02, generator=generator)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, all present.

    Raises:
        ConfigError: there are none, or one that the index lists is not there.
    """
    if (folder / _INDEX).exists():
        return _indexed_files(folder)
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    problem = f"{folder} holds neither {_SINGLE} nor {_INDEX}"
    if any(True for pattern in _PICKLED for _ in folder.glob(pattern)):
        problem += "; its pickled weights are not read: convert them with transformers' "
        problem += "save_pretrained"
    raise ConfigError(problem)


def _indexed_files(folder: Path) -> list[Path]:
    weight_map = read_json_object(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{folder / _INDEX}: weight_map must be an object of tensors and files")
    files = []
    for name in sorted({str(file) for file in weight_map.values()}):
        if Path(name).name != name:
            raise ConfigError(f"{folder / _INDEX}: {shorten(name)} must be a file in this folder")
        if not (folder / name).exists():
            raise ConfigError(f"{folder / name}, listed in {_INDEX}, is missing; download it again")
        files.append(folder / name)
    return files


def _tensors(files: list[Path]) -> Iterator[tuple[Path, str, Tensor]]:
    """Each file's tensors, mapped from disk and read as they are copied."""
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    yield file, name, tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{file} is truncated or damaged ({error}); download it again"
            ) from error


def _fill(parameters: Mapping[str, Parameter], origin: str, name: str, tensor: Tensor) -> None:
    if name not in parameters:
        raise ConfigError(f"{origin} has no place in this architecture")
    parameter = parameters[name]
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


def _is_ignored(name: str) -> bool:
    return name.endswith(_IGNORED) or _QUERY_SCALES.fullmatch(name) is not None


def _usual_name(name: str) -> str:
    """Return the one name of a scale of keys or values; other names are returned as they are."""
    match = _KV_SCALES.fullmatch(name)
    if match is None:
        return name
    return f"{match['layer']}.{match['proj'] or match['own']}_scale"


def _count(names: set[str]) -> str:
    return f"{len(names)} tensor{'s are' if len(names) > 1 else ' is'}"
