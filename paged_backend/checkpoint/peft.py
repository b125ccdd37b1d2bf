"""Reads LoRA adapters from the folders that PEFT saves.

``adapter_config.json`` gives the scale of each module, and ``adapter_model.safetensors`` holds the
weights. What would change the result in another way is refused by its key.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_backend.checkpoint.safetensors_files import open_tensors
from paged_backend.checkpoint.tensor_names import module_name, usual_name
from paged_backend.values.errors import ConfigError
from paged_backend.values.json_file import read_json_object
from paged_backend.values.options.lora import MAX_RANK
from paged_backend.values.validation import shorten

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_MAX_CONFIG_BYTES = 2**20
_MAX_PATTERNS = 256
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# Keys of adapter_config.json that change the product, with the values that do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None, {}),
    "use_bdlora": (None, False, {}),
    "megatron_config": (None, {}),
    "monteclora_config": (None, {}),
    "kasa_config": (None, {}),
    # The other ways to begin change the weights of the base model.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}


class ModuleSizes(NamedTuple):
    """The sizes of a linear layer of a checkpoint."""

    inputs: int
    outputs: int


class LowRank(NamedTuple):
    """What an adapter adds to the output of one module for rows `x`: x @ a @ b."""

    a: Tensor  # [inputs, rank] float32, contiguous
    b: Tensor  # [rank, outputs] float32, contiguous, times the scale


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter with its weights.

    Attributes:
        digest: differs between adapters with different weights.
        modules: the weights by the names of the modules, such as
            ``model.layers.0.self_attn.q_proj``.
    """

    digest: str
    modules: Mapping[str, LowRank]


def read_adapter(
    folder: Path,
    sizes: Mapping[str, ModuleSizes],
    max_rank: int,
    is_elsewhere: Callable[[str], bool] = lambda name: False,
) -> Adapter:
    """Read an adapter, and check it against the model.

    Args:
        folder: the folder that PEFT has saved.
        sizes: the sizes of all modules here that can have adapters, by their names.
        max_rank: the largest rank.
        is_elsewhere: whether another stage has the module of a name. That stage checks its weights;
            here, they are a part of the digest only.

    Raises:
        ConfigError: a file is missing or damaged, or the adapter does not fit; the message names
            the file and the key or tensor.
    """
    config = _Config(folder)
    file = folder / WEIGHTS
    if not file.exists():
        problem = f"{file} is missing"
        if (folder / PICKLED).exists():
            problem += f"; {PICKLED} is pickled, and is not read: save it with safe_serialization"
        raise ConfigError(problem)
    modules: dict[str, LowRank] = {}
    digest = hashlib.sha256()
    with open_tensors(file) as tensors:
        names = {name: module_name(name, sizes) for name in _modules_of(file, tensors.keys())}
        for name, usual in names.items():
            found = sizes.get(usual)
            if found is None and not is_elsewhere(usual):
                raise ConfigError(f"{file}: {shorten(name)} is no module that can have an adapter")
            weights = _read_module(file, tensors, name, found, config, max_rank)
            _add_to_digest(digest, usual_name(name), weights)  # the same in all stages
            if found is not None:
                modules[usual] = weights
    config.check_targets(names.values())
    return Adapter(digest.hexdigest(), modules)


def check_inside(root: Path, folder: Path) -> Path:
    """Return the real path of an adapter's folder.

    Args:
        root: the folder that must have the adapter.
        folder: the adapter's folder, absolute or relative to ``root``.

    Raises:
        ConfigError: the folder or one of its files is outside, also by links.
    """
    try:
        root = root.resolve()
        found = (root / folder).resolve()
        paths = [found, *((found / name).resolve() for name in (CONFIG, WEIGHTS))]
    except (OSError, RuntimeError, ValueError):  # a loop of links, or no path at all
        paths = []
    if not paths or not all(path.is_relative_to(root) for path in paths):
        raise ConfigError(f"{shorten(str(folder))} is not inside of the folder of adapters")
    return found


def _modules_of(file: Path, names: list[str]) -> list[str]:
    """Return the names of the modules with weights, each of which has both matrices."""
    found: dict[str, set[str]] = {}
    for name in names:
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ConfigError(
                f"{file}: tensor {shorten(name)} is not supported; only lora_A.weight and "
                "lora_B.weight of linear layers are"
            )
        found.setdefault(match[1], set()).add(match[2])
    for module, letters in found.items():
        if len(letters) != 2:
            missing = "AB".replace(letters.pop(), "")
            raise ConfigError(f"{file}: lora_{missing}.weight of {shorten(module)} is missing")
    return sorted(found)


def _read_module(
    file: Path,
    tensors: Any,
    module: str,
    sizes: ModuleSizes | None,
    config: _Config,
    max_rank: int,
) -> LowRank:
    """Read the weights of a module; its sizes are not checked if they are not known here."""
    rank = config.rank_of(module)
    if rank > max_rank:
        raise ConfigError(
            f"{config.file}: r is {rank} for {module}; at most max_lora_rank ({max_rank})"
        )
    shapes: dict[str, tuple[int, int] | None] = {"A": None, "B": None}
    if sizes is not None:
        shapes = {"A": (rank, sizes.inputs), "B": (sizes.outputs, rank)}
    weights: list[Tensor] = []
    for letter, shape in shapes.items():
        name = f"base_model.model.{module}.lora_{letter}.weight"
        found = tuple(tensors.get_slice(name).get_shape())
        if shape is None and len(found) != 2:
            raise ConfigError(f"{file}: {name} has the shape {list(found)}; it must be a matrix")
        if shape is not None and found != shape:
            raise ConfigError(
                f"{file}: {name} has the shape {list(found)}; the model and the rank ask for "
                f"{list(shape)}"
            )
        tensor = tensors.get_tensor(name)
        if tensor.dtype not in _DTYPES:
            raise ConfigError(f"{file}: {name} must be in float32, float16 or bfloat16")
        weights.append(tensor.float().t().contiguous())
    a, b = weights
    return LowRank(a, b * config.scale_of(module))


def _add_to_digest(digest: hashlib._Hash, name: str, weights: LowRank) -> None:
    for tensor in weights:
        digest.update(f"{name} {list(tensor.shape)} ".encode())
        digest.update(tensor.numpy().tobytes())


class _Config:
    """The adapter_config.json of a folder.

    Raises:
        ConfigError: it cannot be read, or asks for something that is not supported.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / CONFIG
        self._values = values = read_json_object(self.file, _MAX_CONFIG_BYTES)
        if values.get("peft_type") != "LORA":
            raise self._error("peft_type", "can only be LORA")
        for key, neutral in _NEUTRAL.items():
            if values.get(key) not in neutral:
                raise self._error(key, "is not supported")
        self._uses_rslora = bool(values.get("use_rslora"))
        self._rank = self._number("r", values.get("r"), int)
        self._alpha = self._number("lora_alpha", values.get("lora_alpha"), float)
        self._ranks = self._patterns("rank_pattern", int)
        self._alphas = self._patterns("alpha_pattern", float)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module."""
        return int(_find(module, self._ranks, self._rank))

    def scale_of(self, module: str) -> float:
        """Return the factor on the product of a module."""
        rank, alpha = self.rank_of(module), _find(module, self._alphas, self._alpha)
        return alpha / (math.sqrt(rank) if self._uses_rslora else rank)

    def check_targets(self, modules: Collection[str]) -> None:
        """Check that each target module has weights.

        Raises:
            ConfigError: one has none.
        """
        targets = self._values.get("target_modules")
        for target in targets if isinstance(targets, list) else []:
            if not any(name == target or name.endswith(f".{target}") for name in modules):
                raise self._error(
                    "target_modules", f"has {shorten(target)}, of which {WEIGHTS} has no weights"
                )
        if not modules:
            raise ConfigError(f"{self.file.parent / WEIGHTS} has no weights")

    def _number(self, key: str, value: Any, kind: type) -> float:
        kinds = (int, float) if kind is float else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise self._error(key, "must be a number")
        number = float(value)
        if not math.isfinite(number) or (kind is int and not 1 <= number <= MAX_RANK):
            raise self._error(key, f"must be from 1 to {MAX_RANK}")
        return number

    def _patterns(self, key: str, kind: type) -> dict[str, float]:
        patterns = self._values.get(key) or {}
        if not isinstance(patterns, dict) or len(patterns) > _MAX_PATTERNS:
            raise self._error(key, f"must be an object of at most {_MAX_PATTERNS} entries")
        for pattern in patterns:
            # PEFT reads them as regular expressions, which can take any time.
            if not re.fullmatch(r"\^?[\w.\\]+", pattern):
                raise self._error(key, f"can only have names of modules, got {shorten(pattern)}")
        return {
            pattern.replace("\\", ""): self._number(key, value, kind)
            for pattern, value in patterns.items()
        }

    def _error(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.file}: {key} {problem}, got {shorten(self._values.get(key))}")


def _find(module: str, patterns: Mapping[str, float], default: float) -> float:
    """Return the number of the first pattern that names a module, as a whole or at its end."""
    for pattern, value in patterns.items():
        if pattern.startswith("^"):
            is_named = module == pattern[1:]
        else:
            is_named = module == pattern or module.endswith(f".{pattern}")
        if is_named:
            return value
    return default
