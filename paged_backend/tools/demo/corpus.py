"""Training text of the demo models, read from the running Python's standard library."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Iterator

from paged_backend.tools.demo import Question

# Functions to ask about, by module. Questions name built-in functions without their module.
FUNCTIONS = {
    "builtins": "abs all any ascii bin compile delattr divmod eval exec globals hasattr hash hex "
    "id input isinstance issubclass len locals oct open ord print repr round setattr sorted",
    "os": "abort access chdir chmod close cpu_count dup fork fsync get_terminal_size getcwd "
    "getenv getgid getpid getppid getuid isatty kill link listdir read readlink remove rename "
    "replace scandir stat strerror symlink system umask uname unlink unsetenv urandom utime write",
    "os.path": "abspath commonpath exists expanduser getatime getctime getmtime getsize isdir "
    "join normcase realpath splitdrive splitext",
    "math": "acos asin atan atan2 cbrt ceil comb copysign cos cosh degrees dist exp exp2 fsum "
    "isclose isfinite isinf isnan isqrt log10 log2 pow prod radians remainder sin sqrt tan trunc",
    "statistics": "fmean geometric_mean harmonic_mean mean median median_high median_low mode "
    "multimode pstdev quantiles stdev variance",
    "random": "choice choices randbytes sample seed shuffle",
    "re": "compile escape findall finditer split",
    "textwrap": "dedent fill indent shorten wrap",
    "shutil": "chown copy2 copyfile copymode copytree disk_usage make_archive move rmtree",
    "glob": "escape glob iglob",
    "fnmatch": "fnmatch fnmatchcase translate",
    "json": "dump dumps load loads",
    "calendar": "isleap month monthcalendar",
    "copy": "copy deepcopy",
    "operator": "add contains mul not_ sub",
    "heapq": "heapify heappop heappush merge nlargest nsmallest",
    "bisect": "bisect_left insort_left",
    "inspect": "cleandoc getdoc getfile getmembers getmodule getsource isclass isfunction "
    "isgenerator signature",
    "ast": "dump get_docstring iter_fields literal_eval parse walk",
    "threading": "active_count current_thread main_thread",
    "subprocess": "check_output getoutput run",
    "socket": "create_server getaddrinfo getfqdn",
    "struct": "calcsize iter_unpack",
    "unicodedata": "category decimal lookup name normalize",
    "base64": "b16encode b32encode b64decode b64encode",
    "urllib.parse": "parse_qs quote_plus unquote urldefrag urlencode urljoin",
    "uuid": "uuid1 uuid4 uuid5",
    "tempfile": "mkdtemp mkstemp",
    "gzip": "compress decompress",
    "zlib": "adler32 crc32",
    "shlex": "join quote split",
    "difflib": "get_close_matches unified_diff",
    "gc": "collect disable enable get_count",
    "sys": "exc_info exit getrecursionlimit getrefcount setrecursionlimit",
    "logging": "basicConfig getLogger",
    "asyncio": "create_task gather get_event_loop run sleep",
    "signal": "alarm getsignal pause",
    "dataclasses": "asdict astuple fields replace",
}

MIN_WORDS, MAX_WORDS = 3, 20

# Abbreviations with a period that does not end the sentence, and notation that is not prose.
_UNCLEAR = re.compile(r"->|[\\<>{}|=]|\b(?:e\.g|i\.e|etc)\.", re.IGNORECASE)
# The memory address in a default value's repr, which differs from run to run.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_FIRST_SENTENCE = re.compile(r"(.+?\.)(?:\s|$)")


def questions() -> list[Question]:
    """Return a question for each of `FUNCTIONS` that this Python documents in a clear sentence."""
    found: list[Question] = []
    for module_name, short_names in FUNCTIONS.items():
        module = importlib.import_module(module_name)
        for short in short_names.split():
            answer = first_sentence(inspect.getdoc(getattr(module, short, None)) or "")
            if answer is not None:
                name = _qualified(module_name, short)
                found.append(Question(name, f"What does {name} do?", answer))
    return found


def first_sentence(docstring: str) -> str | None:
    """Return a docstring's first sentence on one line, or None where it is not plain prose."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    match = _FIRST_SENTENCE.match(paragraph)
    if match is None:
        return None
    sentence = match[1]
    plain = sentence.isascii() and sentence[0].isupper() and not _UNCLEAR.search(sentence)
    return sentence if plain and MIN_WORDS <= len(sentence.split()) <= MAX_WORDS else None


def documents() -> list[str]:
    """Return the signature and docstring of each documented callable in `FUNCTIONS`' modules."""
    texts: dict[str, None] = {}
    for module_name in FUNCTIONS:
        for short, member in _documented(module_name):
            header = f"{_qualified(module_name, short)}{_signature(member)}"
            texts[f"{header}\n{inspect.getdoc(member)}"] = None
    return list(texts)


def names() -> list[str]:
    """Return the name of each documented callable in `FUNCTIONS`' modules, in order."""
    return sorted(
        {_qualified(module, short) for module in FUNCTIONS for short, _ in _documented(module)}
    )


def sentences() -> list[str]:
    """Return the first sentence of each document that begins with a clear one, in order."""
    bodies = (text.partition("\n")[2] for text in documents())
    return sorted({sentence for body in bodies if (sentence := first_sentence(body))})


def _documented(module_name: str) -> Iterator[tuple[str, object]]:
    for short, member in sorted(vars(importlib.import_module(module_name)).items()):
        if not short.startswith("_") and callable(member) and inspect.getdoc(member):
            yield short, member


def _qualified(module_name: str, short: str) -> str:
    return short if module_name == "builtins" else f"{module_name}.{short}"


def _signature(member: object) -> str:
    try:
        with warnings.catch_warnings(action="ignore"):
            signature = str(inspect.signature(member)) if callable(member) else "()"
    except (TypeError, ValueError):  # many built-ins carry no signature
        return "(...)"
    return _ADDRESS.sub("", signature)
