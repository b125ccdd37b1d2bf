"""Reads the syntax tree of a chat template."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_CONTENT = "content"
_MAX_KEPT = 32  # templates with remembered arguments; a model has two or four


class _Generation(Extension):
    """The tag ``generation`` of transformers, around what the assistant said."""

    tags = {"generation"}  # Jinja's declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ENVIRONMENT = ImmutableSandboxedEnvironment(  # parses what transformers' environment does
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
)


def takes_argument(source: str, name: str) -> bool:
    """Return True if a template reads an argument; words of its text are none.

    In a template with errors, any mention of the name counts; rendering reports the errors.
    """
    arguments = _arguments(source)
    if arguments is None:
        return re.search(rf"\b{re.escape(name)}\b", source) is not None
    return name in arguments


@functools.lru_cache(_MAX_KEPT)
def _arguments(source: str) -> frozenset[str] | None:
    try:
        return frozenset(meta.find_undeclared_variables(_ENVIRONMENT.parse(source)))
    except Exception:  # also of filters that are not Jinja's
        return None


def iterates_content(source: str) -> bool:
    """Return True if a template has a loop over the content of messages, as in vLLM's detection.

    The content is an attribute or an item with this name, or a variable or an argument of a macro
    that has it, in whole or as a slice, or filtered. False for a template with errors.
    """
    try:
        tree = _ENVIRONMENT.parse(source)
    except Exception:  # rendering reports it
        return False
    names = _names_of_content(tree)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _names_of_content(tree: nodes.Template) -> set[str]:
    """Return the variables and the parameters of macros that have the content of a message."""
    names = {_CONTENT}
    bindings = [*_assignments(tree), *_macro_arguments(tree)]
    while more := {name for name, value in bindings if _is_content(value, names)} - names:
        names |= more
    return names


def _assignments(tree: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name):
            yield assignment.target.name, assignment.node


def _macro_arguments(tree: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    macros = {macro.name: macro.args for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        parameters = macros.get(call.node.name, []) if isinstance(call.node, nodes.Name) else []
        for parameter, value in zip(parameters, call.args, strict=False):
            yield parameter.name, value
        for keyword in call.kwargs if parameters else ():
            yield keyword.key, keyword.value


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    match node:
        case nodes.Name(name=name):
            return name in names
        case nodes.Getattr(attr=name) | nodes.Getitem(arg=nodes.Const(value=name)):
            return bool(name == _CONTENT)
        case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value=name), *_]):
            return bool(name == _CONTENT)
        case nodes.Getitem(node=value, arg=nodes.Slice()):
            return _is_content(value, names)
        case nodes.Filter(node=value) | nodes.Test(node=value):
            return _is_content(value, names)
        case nodes.CondExpr(expr1=first, expr2=second):
            return _is_content(first, names) or _is_content(second, names)
    return False
