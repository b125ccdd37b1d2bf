"""A repository of the Hugging Face Hub, as the options name it."""

from __future__ import annotations

from dataclasses import dataclass

from paged_backend.values.validation import shorten


@dataclass(frozen=True, slots=True)
class HubRepository:
    """The repository of a model or of a tokenizer, at a revision."""

    name: str
    revision: str | None = None  # branch, tag or commit hash; None is the main branch
    download_dir: str | None = None  # cache folder; None is the library's
    role: str = "model"  # or tokenizer, for error messages

    @property
    def revision_option(self) -> str:
        """The name of the option that gives the revision."""
        return "revision" if self.role == "model" else "tokenizer_revision"

    def __str__(self) -> str:
        if self.revision is None:
            return f"{self.role} {self.name}"
        return f"{self.role} {self.name} at revision {shorten(self.revision, quote=False)}"
