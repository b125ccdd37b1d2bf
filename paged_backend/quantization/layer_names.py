"""Lists of layers in a quantization_config: names, regular expressions and wildcards."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from fnmatch import translate

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.limits import MAX_PATTERNS
from paged_backend.quantization.patterns import PatternMatcher, Patterns
from paged_backend.values.validation import shorten

_REGEX = "re:"


class LayerNames:
    """The layers that a list stands for; `in` asks for a layer's full name.

    Args:
        names: whole names, or parts of names if `in_parts`.
        patterns: expressions that the beginning of a name matches; None for none.
        wildcards: the same, made of wildcards, which match in linear time.
        in_parts: whether a name stands for all layers with its parts, in order, in their names.
    """

    def __init__(
        self,
        names: Collection[str],
        patterns: Patterns | None = None,
        wildcards: Sequence[re.Pattern[str]] = (),
        *,
        in_parts: bool = False,
    ) -> None:
        self._names = names
        self._patterns = patterns
        self._wildcards = wildcards
        self._in_parts = in_parts

    def __contains__(self, layer: str) -> bool:
        found = _runs(layer) if self._in_parts else iter((layer,))
        if any(name in self._names for name in found):
            return True
        if any(wildcard.match(layer) for wildcard in self._wildcards):
            return True
        return self._patterns is not None and self._patterns.first(layer) is not None

    @classmethod
    def read(
        cls, config: ConfigFile, key: str, matcher: PatternMatcher | None = None
    ) -> LayerNames:
        """Read a list of whole names, and of regular expressions after "re:".

        Args:
            config: the object that has the list.
            key: key of the list.
            matcher: matcher of the checkpoint, if it has several lists of expressions.

        Raises:
            ConfigError: it is not a list of strings, or an expression is wrong.
        """
        names, found = _divided(config, key, lambda name: name.startswith(_REGEX))
        expressions = [expression.removeprefix(_REGEX) for expression in found]
        return cls(names, Patterns(config, key, expressions, matcher or PatternMatcher()))

    @classmethod
    def read_parts(cls, config: ConfigFile, key: str) -> LayerNames:
        """Read a list of names of layers or of modules that hold them, in any depth.

        Regular expressions after "re:" are read, too.

        Raises:
            ConfigError: it is not a list of strings, or an expression is wrong.
        """
        whole = cls.read(config, key)
        return cls(whole._names, whole._patterns, in_parts=True)

    @classmethod
    def read_wildcards(cls, config: ConfigFile, key: str) -> LayerNames:
        """Read a list of names in which * stands for any text.

        Names without one stand for modules and the layers in them, too.

        Raises:
            ConfigError: it is not a list of strings.
        """
        names, expressions = _divided(config, key, lambda name: any(c in name for c in "*?["))
        wildcards = [re.compile(translate(expression)) for expression in expressions]
        return cls(names, wildcards=wildcards, in_parts=True)


def _divided(
    config: ConfigFile, key: str, is_expression: Callable[[str], bool]
) -> tuple[set[str], list[str]]:
    """Read a list of strings, and divide it into names and expressions."""
    names = config.value(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise config.error(key, f"must be a list of strings, got {shorten(names)}")
    expressions = list(filter(is_expression, names))
    # Each is compared with each layer; whole names are only looked up.
    if len(expressions) > MAX_PATTERNS:
        raise config.error(
            key, f"must have at most {MAX_PATTERNS} expressions, got {len(expressions)}"
        )
    return set(names).difference(expressions), expressions


def _runs(layer: str) -> Iterator[str]:
    """Yield all parts of a name that begin and end at a dot or at an end of the name."""
    parts = layer.split(".")
    for first in range(len(parts)):
        for last in range(first, len(parts)):
            yield ".".join(parts[first : last + 1])
