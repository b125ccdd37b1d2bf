"""Lists of layers in a quantization_config: names, regular expressions and wildcards."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import translate

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.validation import shorten

_REGEX = "re:"


class LayerNames:
    """The layers that a list stands for; `in` asks for a layer's full name."""

    def __init__(self, patterns: Sequence[re.Pattern[str]]) -> None:
        self._patterns = patterns

    def __contains__(self, layer: str) -> bool:
        return any(pattern.match(layer) for pattern in self._patterns)

    @classmethod
    def read(cls, config: ConfigFile, key: str) -> LayerNames:
        """Read a list of whole names, and of regular expressions after "re:".

        Raises:
            ConfigError: it is no list of strings, or an expression is wrong.
        """
        return cls._read(config, key, _name_or_regex)

    @classmethod
    def read_parts(cls, config: ConfigFile, key: str) -> LayerNames:
        """Read a list of names of layers or of modules that hold them, in any depth.

        Raises:
            ConfigError: it is no list of strings.
        """
        return cls._read(config, key, lambda name: rf"(.*\.)?{re.escape(name)}(\..*)?$")

    @classmethod
    def read_wildcards(cls, config: ConfigFile, key: str) -> LayerNames:
        """Read a list of names in which * stands for any text.

        Raises:
            ConfigError: it is no list of strings.
        """
        return cls._read(config, key, translate)

    @classmethod
    def _read(cls, config: ConfigFile, key: str, to_regex: Callable[[str], str]) -> LayerNames:
        names = config.value(key) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise config.error(key, f"must be a list of strings, got {shorten(names)}")
        return cls([compile_regex(config, key, to_regex(name)) for name in names])


def compile_regex(config: ConfigFile, key: str, regex: str) -> re.Pattern[str]:
    """Compile a regular expression that stands in a config under a key.

    Raises:
        ConfigError: it is none.
    """
    try:
        return re.compile(regex)
    except re.error as error:
        raise config.error(key, f"holds a wrong expression, {shorten(regex)}: {error}") from error


def _name_or_regex(name: str) -> str:
    if name.startswith(_REGEX):
        return name.removeprefix(_REGEX)
    return re.escape(name) + "$"
