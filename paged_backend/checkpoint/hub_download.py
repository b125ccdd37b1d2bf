"""Downloads models from the Hugging Face Hub: the files that are needed, all of one commit.

huggingface_hub keeps them in its cache, locks them against other processes, and goes on where a
connection broke. Without a connection it uses what the cache has.
"""

from __future__ import annotations

import glob
import shutil
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from huggingface_hub import (
    get_cached_repo_tree,
    hf_hub_download,
    is_offline_mode,
    snapshot_download,
)
from huggingface_hub.errors import CachedRepoTreeNotFoundError

from paged_backend.checkpoint.hub_errors import cache_folder, hub_errors, not_in_cache
from paged_backend.checkpoint.hub_progress import progress_class, size_text
from paged_backend.checkpoint.hub_repository import HubRepository
from paged_backend.checkpoint.weight_index import INDEX, SINGLE, pickled_names, weight_names
from paged_backend.values.errors import ConfigError
from paged_backend.values.log import LOG
from paged_backend.values.validation import shorten

# Configurations, tokenizers, chat templates and the index of the weights. Of the folders only those
# of sentence-transformers' modules are needed, such as 1_Pooling, and additional_chat_templates;
# onnx/ and original/ are not.
_TEXTS = ["*.json", "*.jinja", "*.model", "*.txt"]
_TEMPLATES = "additional_chat_templates"
_NO_TEXTS = [
    "[!0-9a]*/*",
    # Names with the same beginning that go on with another character.
    *(f"{_TEMPLATES[:end]}[!{_TEMPLATES[end]}]*/*" for end in range(1, len(_TEMPLATES))),
    "*/*/*",
]


def download(repository: HubRepository, *, weights: bool) -> Path:
    """Download what is not in the cache.

    Args:
        repository: what to download.
        weights: whether the weights are needed, too.

    Returns:
        The folder of the files, named after their commit.

    Raises:
        ConfigError: there is no such model, it cannot be downloaded, or its weights cannot be used.
    """
    with hub_errors(repository):
        folder = Path(
            snapshot_download(
                repository.name,
                revision=repository.revision,
                cache_dir=repository.download_dir,
                allow_patterns=_TEXTS,
                ignore_patterns=_NO_TEXTS,
                tqdm_class=progress_class(str(repository), 0),
            )
        )
        if weights:
            _download_weights(repository, folder)
    return folder


def download_config(repository: HubRepository) -> Path:
    """Return the config.json of a model, which is downloaded without the rest.

    Raises:
        ConfigError: it cannot be downloaded.
    """
    with hub_errors(repository):
        return Path(
            hf_hub_download(
                repository.name,
                "config.json",
                revision=repository.revision,
                cache_dir=repository.download_dir,
            )
        )


def _download_weights(repository: HubRepository, folder: Path) -> None:
    sizes = _sizes(repository, folder)
    missing = [
        name for name in _weight_names(repository, folder, sizes) if not (folder / name).exists()
    ]
    if not missing:
        return
    if is_offline_mode():
        raise not_in_cache(repository)
    num_bytes = sum(sizes.get(name, 0) for name in missing)
    _check_space(repository, folder, num_bytes)
    what = f"{repository.name} ({folder.name[:8]})"
    LOG.info("downloading %s: %s in %d files", what, size_text(num_bytes), len(missing))
    start_s = time.monotonic()
    snapshot_download(
        repository.name,
        revision=folder.name,  # the commit of the index, even if the branch has moved
        cache_dir=repository.download_dir,
        allow_patterns=[glob.escape(name) for name in missing],
        tqdm_class=progress_class(what, num_bytes),
    )
    LOG.info("downloaded %s in %.0f s", what, time.monotonic() - start_s)


def _sizes(repository: HubRepository, folder: Path) -> Mapping[str, int]:
    """Return the files of the repository, in bytes; empty if they are not known.

    They are not known without a connection if an old version of the library filled the cache.
    """
    try:
        files = get_cached_repo_tree(
            repository.name, revision=folder.name, cache_dir=repository.download_dir
        )
    except CachedRepoTreeNotFoundError:
        return {}
    return {file.path: file.size for file in files}


def _weight_names(repository: HubRepository, folder: Path, files: Collection[str]) -> list[str]:
    """Return the files that the loader will read."""
    present = files or [path.name for path in folder.iterdir()]
    names = weight_names(folder, present)
    if not names and files:
        raise ConfigError(_without_weights(repository, files))
    absent = [name for name in names if name not in files] if files else []
    if absent:
        raise ConfigError(
            f"{repository}: the index lists files that are not in the repository: {_listed(absent)}"
        )
    return names or [SINGLE]


def _without_weights(repository: HubRepository, files: Iterable[str]) -> str:
    ggufs = [name for name in files if name.endswith(".gguf")]
    pickled = pickled_names(files)
    others = [name for name in files if name.endswith(".safetensors")]
    problem = f"{repository} has neither {SINGLE} nor {INDEX}"
    if ggufs:
        return (
            f"{problem}, but GGUF files ({_listed(ggufs)}); download one of them with `hf download "
            f"{repository.name} FILE`, and give the path that it prints as the model"
        )
    if pickled:
        return (
            f"{problem}, but pickled weights ({_listed(pickled)}), which are not read; convert "
            "them with transformers' save_pretrained"
        )
    return f"{problem}; it has {_listed(others) if others else 'no weights'}"


def _listed(names: Iterable[str]) -> str:
    return shorten(", ".join(sorted(names)), 200, quote=False)


def _check_space(repository: HubRepository, folder: Path, num_bytes: int) -> None:
    """Refuse what the disk cannot hold; the library only warns.

    Raises:
        ConfigError: there is too little room.
    """
    # What another process has already written of the same files takes no more room.
    begun = 0
    for blob in (folder.parent.parent / "blobs").glob("*.incomplete"):
        with suppress(FileNotFoundError):  # that process has just finished the file
            begun += blob.stat().st_size
    free = shutil.disk_usage(folder).free
    if num_bytes > free + begun:
        raise ConfigError(
            f"{repository} needs {size_text(num_bytes)} in {cache_folder(repository)}, which has "
            f"{size_text(free)} left; make room, or set download_dir or HF_HOME to another disk"
        )
