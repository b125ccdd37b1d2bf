"""Reads the syntax tree of a chat template."""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes

_CONTENT = "content"


def iterates_content(source: str) -> bool:
    """Return True if a template has a loop over the content of messages, as in vLLM's detection.

    The content is an attribute or an item with this name, or a variable or an argument of a macro
    that has it, in whole or as a slice, or filtered. False for a template with errors.
    """
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        tree = _compile_jinja_template(source).environment.parse(source)
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
