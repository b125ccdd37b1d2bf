"""The process that reads tokenizers: ``python -P -m paged_backend.text.resolve_process``.

`transformers` alone knows what the files of a checkpoint mean together. Its import takes a second,
and the files are a stranger's, so it reads them here, once, within limits of time and memory. No
code of the checkpoint is run, and nothing is downloaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paged_backend.sandbox.server import Answer, answer_lines, problem
from paged_backend.values.errors import ConfigError

TIME_LIMIT_S = 120.0  # processor time; the largest vocabularies of SentencePiece take a quarter
MEMORY_LIMIT = 2**32  # bytes; the largest tokenizers take a quarter
_TOKENIZER_FILE = "tokenizer.json"
# The file that nearly all tokenizers have, in newer and older forms.
_COMMON_FILES = (_TOKENIZER_FILE, "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "RAYON_NUM_THREADS": "1",  # each thread reserves memory
    "TOKENIZERS_PARALLELISM": "false",
    "RUST_BACKTRACE": "0",
}


def main() -> None:
    """Answer each line of stdin until it is closed."""
    answer_lines(_prepare, time_limit_s=TIME_LIMIT_S, memory_limit=MEMORY_LIMIT)


def _prepare() -> Callable[[Any], Answer]:
    os.environ.update(_SETTINGS)
    sys.modules["torch"] = None  # type: ignore[assignment]  # no tokenizer needs it, and it is slow
    import transformers  # noqa: F401  # before the process is ready: it takes a second

    def answer(folder: Any) -> Answer:
        try:
            return _resolve(Path(folder))
        except MemoryError:
            return problem(f"it needs over {MEMORY_LIMIT // 2**20} MiB of memory")
        except BaseException as error:  # the converters raise various types, and Rust's panics
            return problem(_reason(Path(folder), error))

    return answer


def _resolve(folder: Path) -> Answer:
    import tokenizers

    from paged_backend.text.tokenizer_limits import check_tokenizer

    loaded, note = _load(folder)
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        return problem(f"{type(loaded).__name__} has no fast version; add a {_TOKENIZER_FILE}")
    backend.no_truncation()
    backend.no_padding()
    check_tokenizer(backend)
    special_tokens = loaded.special_tokens_map
    end_token = special_tokens.get("eos_token")
    return {
        "backend": backend.to_str(),
        "special_tokens": special_tokens,
        "end_token_id": None if end_token is None else backend.token_to_id(end_token),
        "splits_special_tokens": bool(loaded.split_special_tokens),
        "note": note,
    }


def _reason(folder: Path, error: BaseException) -> str:
    """Return one line about an error, from the library that knows best what is wrong."""
    import tokenizers

    file = folder / _TOKENIZER_FILE
    if not isinstance(error, ConfigError) and file.is_file():
        try:
            tokenizers.Tokenizer.from_file(str(file))
        except BaseException as cause:
            return f"{_TOKENIZER_FILE} holds no tokenizer: {_one_line(cause)}"
    if not any((folder / name).is_file() for name in _COMMON_FILES):
        return f"there is none of {', '.join(_COMMON_FILES)}"
    return _one_line(error)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _load(folder: Path) -> tuple[Any, str]:
    """Return transformers' tokenizer, and what the operator should know about it."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        return AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        ), ""
    except ValueError as error:
        is_refused = "trust_remote_code" in str(error)
        if not is_refused or not (folder / _TOKENIZER_FILE).is_file():
            raise
    # The checkpoint's own class is code; the file describes the same tokenizer without it.
    loaded = PreTrainedTokenizerFast.from_pretrained(
        str(folder), trust_remote_code=False, local_files_only=True
    )
    return loaded, f"its tokenizer class is code, which is not run; {_TOKENIZER_FILE} is used alone"


if __name__ == "__main__":
    main()
