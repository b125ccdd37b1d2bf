"""Says in one sentence why files of the Hugging Face Hub cannot be had, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, get_token, is_offline_mode
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from paged_backend.checkpoint.hub_repository import HubRepository
from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.validation import shorten


@contextmanager
def hub_errors(repository: HubRepository) -> Iterator[None]:
    """Convert the errors of a download to ConfigError.

    Raises:
        ConfigError: the block raised an error.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # errors of the HTTP client and of hf_xet have no common base
        raise _explained(repository, error) from error


def not_in_cache(repository: HubRepository) -> ConfigError:
    """Return the error for files that are missing while HF_HUB_OFFLINE is set."""
    return ConfigError(
        f"HF_HUB_OFFLINE is set, and {repository} is not, or not completely, in the cache folder "
        f"{cache_folder(repository)}; download it while connected, or unset HF_HUB_OFFLINE"
    )


def cache_folder(repository: HubRepository) -> str:
    """Return the folder that the files of all repositories are kept in."""
    return repository.download_dir or constants.HF_HUB_CACHE


def _explained(repository: HubRepository, error: Exception) -> ConfigError:
    if is_offline_mode():
        return not_in_cache(repository)
    # The library reports what went wrong with the Hub as the cause of a file missing in its cache.
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, RevisionNotFoundError):
        return option_error(
            repository.revision_option,
            f"must be a branch, a tag or a commit hash of {repository.name} on the Hugging Face "
            f"Hub, got {shorten(repository.revision)}",
        )
    return ConfigError(_sentence(repository, error))


def _sentence(repository: HubRepository, error: Exception) -> str:
    hub = constants.ENDPOINT
    token = "the token in use may not" if get_token() else "HF_TOKEN is not set"
    if isinstance(error, GatedRepoError):
        return (
            f"{repository} is gated: request access at {hub}/{repository.name}, and set HF_TOKEN "
            f"to a token of the account that may read it ({token})"
        )
    if isinstance(error, DisabledRepoError):
        return f"{repository} has been disabled on {hub}"
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status == 401 and get_token() is not None:
            return (
                f"{hub} does not accept the token in use for {repository}: set HF_TOKEN to a valid "
                "token that may read it, and check the name"
            )
        if isinstance(error, RepositoryNotFoundError) or status == 401:
            return (
                f"{repository} is neither a folder here nor a repository on {hub}; check the name, "
                f"and if it is private, set HF_TOKEN to a token that may read it ({token})"
            )
        if isinstance(error, EntryNotFoundError):
            return f"{repository} has no file {error.response.url.path.rpartition('/')[2]} on {hub}"
        answer = f"{status} {error.response.reason_phrase}".strip()
        return f"{repository} cannot be downloaded: {hub} answers {answer}"
    if isinstance(error, OSError) and error.errno is not None:
        return (
            f"{repository} cannot be written to {cache_folder(repository)}: {error.strerror}; set "
            "download_dir or HF_HOME to a folder with room that may be written to"
        )
    reason = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"
    return (
        f"{repository} is not a folder here, and cannot be downloaded from {hub}; check the name "
        f"and the connection ({_short(reason)})"
    )


def _short(text: str) -> str:
    return shorten(text, 200, quote=False)
