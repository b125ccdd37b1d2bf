"""What a template reads: the forms of contents and arguments, for each role."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paged_backend.text.chat import Chat
from paged_backend.text.partial_json import MAX_LENGTH, completed
from paged_backend.text.template_client import TemplateClient
from paged_backend.text.template_syntax import iterates_content, takes_argument
from paged_backend.values.errors import InvalidRequest

TURNS = "{%% for message in messages %%}[{{ message.role }}]%s{%% endfor %%}"
LOOP = TURNS % "{% for part in message.content %}{{ part.text }};{% endfor %}"
TEXT = TURNS % "{{ message.content }}"
EITHER = TURNS % (
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }};{% endfor %}{% endif %}"
)
ONE = [{"type": "text", "text": "one"}]
TWO = [*ONE, {"type": "text", "text": "two"}]


@pytest.fixture(scope="module")
def client() -> TemplateClient:
    """A process that all tests share, because each start takes seconds."""
    return TemplateClient()


def prompt(client: TemplateClient, source: str, *messages: dict[str, Any], **request: Any) -> str:
    chat = Chat(messages=list(messages))
    return client.render({"chat_template": source, "messages": chat.messages, **request})


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("source", "of_text", "of_parts"),
    [
        (TEXT, "one", "one\ntwo"),
        (LOOP, "one;", "one;two;"),
        (EITHER, "one", "one;two;"),
        (TURNS % "{{ message.content[0].text }}", "one", "one\ntwo"),
        (TURNS % "{% for p in message.get('content') %}{{ p.text }};{% endfor %}", "one;", None),
        (TURNS % "{% set c = message['content'] %}{% for p in c %}{{ p.text }};{% endfor %}", 0, 0),
        (TURNS % "{% set x = message.content %}{{ x | map(attribute='text') | join(';') }};", 0, 0),
        (
            "{% macro show(x) %}{% for p in x if p.type == 'text' %}{{ p['text'] }};{% endfor %}"
            "{% endmacro %}" + TURNS % "{{ show(x=message.content) }}",
            0,
            0,
        ),
        (
            "{% set ns = namespace(last='') %}{% for m in messages %}{% set ns.last = m.content %}"
            "{% endfor %}[user]{% for part in ns.last %}{{ part.text }};{% endfor %}",
            0,
            0,
        ),
        (TURNS % "{{ message.content | tojson }}", '"one"', '"one\\ntwo"'),
        (TURNS % "{{ '' ~ message.content }}", "one", "one\ntwo"),
    ],
)
def test_content_that_a_template_reads(client, source, of_text, of_parts):
    """Where nothing is expected here, the template takes parts, as the second one does."""
    assert prompt(client, source, user("one")) == f"[user]{of_text or 'one;'}"
    assert prompt(client, source, user(TWO)) == f"[user]{of_parts or 'one;two;'}"


def test_each_role_has_its_form(client):
    """A template that reads users' contents as parts, all others as texts."""
    source = TURNS % (
        "{% if message.role == 'user' %}{% for part in message.content %}{{ part.text }};"
        "{% endfor %}{% else %}{{ message.content | trim }}{% endif %}"
    )
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": TWO},
        user("one"),
        {"role": "assistant", "content": TWO, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": TWO},
        user(TWO),
    ]
    assert prompt(client, source, *messages) == (
        "[system]one\ntwo[user]one;[assistant]one\ntwo[tool]one\ntwo[user]one;two;"
    )
    messages = [{**message, "content": "one"} for message in messages]
    assert prompt(client, source, *messages) == (
        "[system]one[user]one;[assistant]one[tool]one[user]one;"
    )


def test_a_branch_for_tools_has_its_form(client):
    """As Llama 4's: with tools, the first message is trimmed as a text."""
    source = (
        "{% if tools %}[first]{{ messages[0].content | trim }}{% set messages = messages[1:] %}"
        "{% endif %}" + EITHER
    )
    assert prompt(client, source, user(TWO)) == "[user]one;two;"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert prompt(client, source, user(TWO), tools=tools) == "[first]one\ntwo"


def test_results_of_tools_in_a_template_that_takes_only_parts(client):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    result = {"role": "tool", "content": "one"}
    assert prompt(client, LOOP, user("x"), call, result) == "[user]x;[assistant][tool]one;"


def test_other_fields_of_parts_reach_the_template(client):
    source = TURNS % "{% for part in message.content %}{{ part.text }}{{ part.mark }};{% endfor %}"
    part = {"type": "input_text", "text": "one", "mark": "!"}
    assert prompt(client, source, user([part, "two"])) == "[user]one!;two;"


def test_instructions_of_a_developer(client):
    """They are the system's in a template that refuses or leaves out the developer."""
    messages = [{"role": "developer", "content": "one"}, user("x")]
    assert prompt(client, TEXT, *messages) == "[developer]one[user]x"
    known = "{% if message.role in ('system', 'user') %}{{ message.content }}"
    for other in ("", "{% else %}{{ raise_exception('unknown role') }}"):
        source = TURNS % (known + other + "{% endif %}")
        assert prompt(client, source, *messages) == "[system]one[user]x"


def test_a_template_that_says_nothing_about_a_role_gets_what_its_syntax_asks_for(client):
    """It refuses each short conversation, so that only its loop shows what it takes."""
    source = "{% if messages | length < 4 %}{{ raise_exception('short') }}{% endif %}" + LOOP
    assert prompt(client, source, *[user("one")] * 4) == "[user]one;" * 4
    with pytest.raises(InvalidRequest, match="short"):
        prompt(client, source, user("one"))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (LOOP, True),
        (EITHER, True),
        (TEXT, False),
        ("{% for m in messages %}{% for l in m.content.split() %}{% endfor %}{% endfor %}", False),
        ("{% set c = m['content'] if m else x %}{% for p in c[1:] | list %}{% endfor %}", True),
        (
            "{% macro f(a, b) %}{% for p in b %}{% endfor %}{% endmacro %}{{ f(1, m.content) }}",
            True,
        ),
        (
            "{% macro f(a, b) %}{% for p in a %}{% endfor %}{% endmacro %}{{ f(1, m.content) }}",
            False,
        ),
        ("{% generation %}{% for p in m.content %}{% endfor %}{% endgeneration %}", True),
        ("{% for %}", False),
    ],
)
def test_syntax(source: str, expected: bool) -> None:
    assert iterates_content(source) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", True),
        ("{% generation %}{% for m in messages %}{{ tools }}{% endfor %}{% endgeneration %}", True),
        ("{% macro f() %}{{ tools | tojson }}{% endmacro %}{{ f() }}", True),
        ("You have no tools today. {# tools #}{{ message.tools }}{{ 'tools' }}", False),
        ("{% set tools = 'hammers' %}{{ tools }}", False),
        ("{% for %} tools", True),  # with errors
        ("{% for %} toolset", False),
    ],
)
def test_arguments(source: str, expected: bool) -> None:
    assert takes_argument(source, "tools") == expected


@pytest.mark.parametrize(
    ("source", "format", "expected"),
    [
        (TEXT, "string", "[user]one"),
        (LOOP, "openai", "[user]one;"),
        (EITHER, "openai", "[user]one;"),
        (EITHER, "auto", "[user]one"),
    ],
)
def test_the_option(client, source, format, expected):
    assert prompt(client, source, user("one"), content_format=format) == expected


def test_the_forms_depend_on_no_client(client):
    """The arguments of the first request choose another branch than those of the second."""
    source = "{% if odd %}[user]{{ messages[0].content }}{% else %}" + LOOP + "{% endif %}"
    assert prompt(client, source, user("one"), arguments={"odd": 1}).startswith("[user][{")
    assert prompt(client, source, user("one")) == "[user]one;"


def calling(arguments: str) -> str:
    """A template that prints the arguments of calls in this way."""
    call = "{% for call in message.tool_calls or [] %}<"
    return TURNS % (call + arguments + ">{% endfor %}")


CUT = '{"name": "os.pa'
FORMS = {  # how templates print arguments, and what becomes of a whole and of a cut call
    "json": ("{{ call.function.arguments | tojson }}", '{"name": "os"}', CUT),
    "nested": ("{{ call.function | tojson }}", None, f'{{"name": "f", "arguments": {CUT}}}'),
    "text": ("{{ 'x' + call.function.arguments }}", 'x{"name": "os"}', "x" + CUT),
    "bare": ("{{ call.function.arguments }}", '{"name": "os"}', CUT),
    "quoted": ('"{{ call.function.arguments }}"', '"{"name": "os"}"', f'"{CUT}"'),
    "items": (
        "{% for key, value in call.function.arguments | items %}{{ key }}={{ value }}{% endfor %}",
        "name=os",
        "name=os.pa",
    ),
    "keys": (
        "{% for key in call.function.arguments %}{{ key }}={{ call.function.arguments[key] }}"
        "{% endfor %}",
        "name=os",
        "name=os.pa",
    ),
    "content": ("{{ message.content + (call.function.arguments | tojson) }}", None, CUT),
    "nothing": ("", "", ""),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("arguments", ['{"name": "os"}', {"name": "os"}, CUT])
def test_arguments_appear_as_the_model_wrote_them(client, form, arguments):
    source, whole, cut = FORMS[form]
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    result = {"role": "tool", "content": "cut"}
    text = prompt(client, calling(source), user("x"), message, result)
    expected = cut if arguments == CUT else whole
    if expected is None:
        expected = cut.replace(CUT, '{"name": "os"}')
    assert text == f"[user][assistant]<{expected}>[tool]"


@pytest.mark.parametrize("arguments", ["", " ", "\n", "null", None, {}])
def test_blank_arguments_are_an_empty_object(client, arguments):
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    for form in ("json", "text"):
        source = calling(FORMS[form][0])
        text = prompt(client, source, {"role": "assistant", "tool_calls": calls})
        assert text == "[assistant]<" + ("x{}>" if form == "text" else "{}>")


@pytest.mark.parametrize("arguments", ["[1, 2]", "3", "oops", '{"a": 1}}', "[" * 5000])
def test_arguments_that_are_no_object_keep_their_text(client, arguments):
    for form, expected in (("json", arguments), ("items", f"arguments={arguments}")):
        calls = [{"function": {"name": "f", "arguments": arguments}}]
        source = calling(FORMS[form][0])
        text = prompt(client, source, {"role": "assistant", "tool_calls": calls})
        assert text == f"[assistant]<{expected}>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": "x', {"a": "x"}),
        ('{"a": 1, "b": [2, {"c": "d', {"a": 1, "b": [2, {"c": "d"}]}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": 1, "b": tr', {"a": 1}),
        ('{"a": "x\\', {"a": "x"}),
        ('{"a": "x\\u12', {"a": "x"}),
        ('{"a": "x\\ud83e\\udd', {"a": "x"}),
        ('{"a": "\\\\', {"a": "\\"}),
        ("{", {}),
        ("[1", None),
        ("}", None),
        ("", None),
        ('{"a": "' + "x" * MAX_LENGTH, None),
    ],
)
def test_a_cut_object_is_completed(text: str, expected: object) -> None:
    assert completed(text) == expected


def test_every_beginning_of_an_object_is_completed() -> None:
    whole = {"a": ['b"\\', {"c": None}, []], "日": "👩‍👩‍👧", "d": -1.5e3, "e": {"f": True}}
    for text in (json.dumps(whole), json.dumps(whole, ensure_ascii=False)):
        for length in range(1, len(text)):
            value = completed(text[:length])
            assert value is not None and set(value) <= set(whole)
        assert completed(text) == whole
