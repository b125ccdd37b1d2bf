"""From the name a user gives to the folder or the file that holds the checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from paged_backend.checkpoint.bundled import BUNDLED_MODELS
from paged_backend.checkpoint.hub_repository import HubRepository
from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.options.model import ModelOptions
from paged_backend.values.validation import shorten

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The places of the files of a model."""

    model: Path  # folder or GGUF file
    tokenizer: Path  # the same, if the model brings its tokenizer
    commits: dict[str, str] = field(default_factory=dict)
    """Values for ``revision`` and ``tokenizer_revision`` that lead to these files again, even if a
    branch moves; empty for what is not from the Hub."""


def resolve_checkpoint(options: ModelOptions) -> Checkpoint:
    """Find the model and the tokenizer of the options; download what is missing.

    Raises:
        ConfigError: one of them cannot be found or downloaded, or a revision is given for something
            that has none.
    """
    weights = options.load_format != "dummy"
    model = resolve_model(options.model, options.revision, options.download_dir, weights=weights)
    commits = _commit("revision", options.model, model)
    if _has_own_tokenizer(options):
        return Checkpoint(model, model, commits)
    tokenizer = resolve_tokenizer(options)
    name = options.tokenizer or options.model
    return Checkpoint(model, tokenizer, commits | _commit("tokenizer_revision", name, tokenizer))


def resolve_tokenizer(options: ModelOptions) -> Path:
    """Find the folder or GGUF file of the options' tokenizer; no weights are downloaded.

    Raises:
        ConfigError: it cannot be found or downloaded, or has no revisions.
    """
    if _has_own_tokenizer(options):
        return resolve_model(options.model, options.revision, options.download_dir, weights=False)
    return resolve_model(
        options.tokenizer or options.model,
        options.tokenizer_revision,
        options.download_dir,
        weights=False,
        role="tokenizer",
    )


def resolve_model(
    name: str,
    revision: str | None = None,
    download_dir: str | None = None,
    *,
    weights: bool = True,
    role: str = "model",
) -> Path:
    """The folder of a bundled model, a folder, a GGUF file, or a Hugging Face id, downloaded.

    Args:
        name: one of these.
        revision: branch, tag or commit hash of a Hugging Face id.
        download_dir: cache folder of downloads; default: huggingface_hub's.
        weights: whether the weights are needed.
        role: ``model`` or ``tokenizer``, for error messages.

    Raises:
        ConfigError: there is no such folder, and it cannot be downloaded either.
    """
    repository = HubRepository(name, revision, download_dir, role)
    local = _find_local(name, role)
    if local is None:
        # Imported here: it costs a third of a second, and a folder needs none of it.
        from paged_backend.checkpoint.hub_download import download

        return download(repository, weights=weights)
    if revision is not None:
        raise option_error(
            repository.revision_option,
            f"is only for ids on the Hugging Face Hub; {role} {shorten(name)} is "
            + ("bundled" if name in BUNDLED_MODELS else "on this machine"),
        )
    return local


def is_gguf(checkpoint: Path) -> bool:
    """Return whether a checkpoint is a GGUF file; all others are folders."""
    return checkpoint.suffix == ".gguf" and not checkpoint.is_dir()


def download_config(name: str) -> Path:
    """Return the config.json of a Hugging Face id, which is downloaded without the rest.

    Raises:
        ConfigError: it cannot be downloaded.
    """
    from paged_backend.checkpoint import hub_download

    return hub_download.download_config(HubRepository(name))


def _has_own_tokenizer(options: ModelOptions) -> bool:
    return options.tokenizer in (None, options.model) and options.tokenizer_revision is None


def _find_local(name: str, role: str) -> Path | None:
    """Return a bundled model, a folder or a GGUF file; None for a Hugging Face id.

    Raises:
        ConfigError: the name is none of these.
    """
    if name in BUNDLED_MODELS:
        return BUNDLED_MODELS[name]
    path = Path(name).expanduser()
    if path.is_dir() or (is_gguf(path) and path.is_file()):  # no pipe, whose end never comes
        return path
    if path.exists():
        raise ConfigError(
            f"{role} {name} is a file; give the folder that holds config.json, or a GGUF file"
        )
    if is_gguf(path):
        raise ConfigError(f"{role} file {shorten(name)} does not exist")
    if not _HUB_ID.fullmatch(name):
        raise ConfigError(f"{role} folder {shorten(name)} does not exist")
    return None


def _commit(option: str, name: str, folder: Path) -> dict[str, str]:
    """Return the option's value for files of the Hub; their folder has the name of the commit."""
    return {} if _find_local(name, "model") is not None else {option: folder.name}
