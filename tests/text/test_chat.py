from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sample_tokenizers import CORPUS, KINDS
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paged_backend.text.bad_words import resolve_bad_words
from paged_backend.text.chat import Chat, ChatTemplate
from paged_backend.text.detokenizer import token_bytes
from paged_backend.text.tokenizer import Tokenizer, load_tokenizer
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.sampling_params import SamplingParams

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "[{{ message.role }}{{ tone or '' }}] {{ message.content | trim }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "日本語 and 👩‍👩‍👧?"},
    {"role": "assistant", "content": "Well"},
]
HM = {"reasoning": "hm", "reasoning_content": "hm"}
TEXT = [{"type": "text", "text": "x"}]
# As LangChain, Mistral and OpenAI write it.
REASONING_PARTS: list[tuple[str, dict[str, Any]]] = [
    ("reasoning", {"reasoning": "hm", "extras": {}}),
    ("thinking", {"thinking": [{"type": "text", "text": "hm"}], "closed": True}),
    ("reasoning", {"summary": [{"type": "summary_text", "text": "hm"}]}),
    ("reasoning", {"summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}),
]
ENCRYPTED = {"type": "reasoning", "summary": [], "encrypted_content": "abc"}


@pytest.fixture(scope="module", params=["config", "file", "list"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's tokenizer whose template is where checkpoints have theirs."""
    folder = tmp_path_factory.mktemp(request.param)
    PreTrainedTokenizerFast(
        tokenizer_object=KINDS["byte_level"](), bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    if request.param == "file":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    elif request.param == "list":
        config["chat_template"] = [
            {"name": "rag", "template": "x"},
            {"name": "default", "template": TEMPLATE},
        ]
    else:
        config["chat_template"] = TEMPLATE
    file.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"tone": " kindly"}},
    ],
    ids=str,
)
def test_renders_as_transformers(folder: Path, options: dict[str, object]) -> None:
    ours = load_tokenizer(folder)
    assert ours.chat_template is not None
    chat = Chat.from_json({"messages": MESSAGES, **options})
    kwargs = dict(options)
    kwargs.update(kwargs.pop("chat_template_kwargs", {}))
    kwargs.setdefault("add_generation_prompt", not options.get("continue_final_message"))
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, **kwargs)
    assert ours.chat_template.render(chat) == expected
    ids = theirs.apply_chat_template(MESSAGES, return_dict=False, **kwargs)
    assert ours.encode(expected, add_special_tokens=False) == ids


def test_parts_of_text_are_joined(folder: Path) -> None:
    template = load_tokenizer(folder).chat_template
    assert template is not None
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = template.render(Chat.from_json([{"role": "user", "content": parts}]))
    assert "[user] one\ntwo</s>" in text


def test_what_a_template_refuses_names_the_messages(folder: Path) -> None:
    template = load_tokenizer(folder).chat_template
    assert template is not None
    with pytest.raises(InvalidRequest, match=r"^messages: the chat template says: no robots"):
        template.render(Chat.from_json([{"role": "robot", "content": "x"}]))


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    evil = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(InvalidRequest, match="unsafe"):
        ChatTemplate(evil, {}).render(Chat.from_json(MESSAGES))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([], "messages: must be an array"),
        ("hello", "messages: must be an array"),
        ({}, "messages: must be an array"),
        ({"mesages": []}, "mesages: is not known, did you mean messages?"),
        ([3], "messages[0]: must be an object"),
        ([{"role": 3, "content": "x"}], "messages[0].role: must be a string"),
        ([{"role": "user"}], "messages[0].content: must be a string"),
        ([{"role": "user", "content": [3]}], "messages[0].content[0]: must be of type text"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0]: must be of type text, input_text, output_text, refusal, "
            "got 'image_url'",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": 3}]}],
            "messages[0].content[0].text: must be a string",
        ),
        (
            [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
            "messages[0].tool_calls[0]: must be an object with a function",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}],
            "messages[0].tool_calls[0].function.name: must be a string",
        ),
        ([{"role": "assistant", "tool_calls": 3}], "messages[0].tool_calls: must be a list"),
        ([{"role": "system", "content": None}], "messages[0].content: must be a string or a list"),
        (
            [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}],
            "messages[0].content[0]: must be of type text, ",
        ),
        (
            [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}],
            "messages[0].content[0]: must be of type text, ",
        ),
        (
            [{"role": "assistant", "content": [{"type": "reasoning", "summary": [3]}]}],
            "messages[0].content[0].summary: must be a string or a list of parts with texts",
        ),
        (
            [{"role": "assistant", "content": [{"type": "reasoning", "id": "rs"}]}],
            "messages[0].content[0].text: must be a string",
        ),
        (
            [{"role": "assistant", "content": "x", "function_call": {}}],
            "messages[0].function_call: is not supported; use tool_calls",
        ),
        (
            [{"role": "assistant", "content": "x", "reasoning": 3}],
            "messages[0].reasoning: must be a string",
        ),
        ({"messages": MESSAGES, "reasoning_effort": "huge"}, "reasoning_effort: must be one of"),
        ([{"role": "user", "content": "x"}] * 5000, "messages: at most 4096"),
        ({"messages": MESSAGES, "documents": ["x"]}, "documents: must be an array of objects"),
        ({"messages": MESSAGES, "documents": [{}] * 1025}, "documents: at most 1024, got 1025"),
        (
            {"messages": MESSAGES, "add_generation_prompt": 1},
            "add_generation_prompt: must be true or false or null",
        ),
        (
            {
                "messages": MESSAGES,
                "add_generation_prompt": True,
                "continue_final_message": True,
            },
            "add_generation_prompt: must be false where continue_final_message",
        ),
        (
            {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}},
            "chat_template_kwargs: must not hold tools",
        ),
        ({"messages": MESSAGES, "chat_template_kwargs": 3}, "chat_template_kwargs: must be"),
    ],
    ids=str,
)
def test_wrong_chats_are_named(value: object, problem: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Chat.from_json(value)
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": None}, {}),
        ({"content": "x", "name": None, "refusal": None}, {"content": "x"}),
        ({"content": "x", "tool_calls": []}, {"content": "x"}),
        ({"content": "", "tool_calls": None, "function_call": None}, {"content": ""}),
        ({"content": [], "annotations": []}, {"content": [], "annotations": []}),
        (
            {"content": [{"type": "output_text", "text": "x", "annotations": []}]},
            {"content": [{"type": "text", "text": "x", "annotations": []}]},
        ),
        (
            {"content": [{"type": "refusal", "refusal": "no"}, "x"]},
            {"content": [{"type": "text", "text": "no"}, {"type": "text", "text": "x"}]},
        ),
        (
            {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "x"}]},
            {"content": [{"type": "text", "text": "x"}], **HM},
        ),
        (
            {"content": [{"type": "text", "text": None}, {"type": "reasoning", "text": None}, "x"]},
            {"content": [{"type": "text", "text": "x"}]},
        ),
        *(
            ({"content": [{"type": kind, **part}, "x"]}, {"content": TEXT, **HM})
            for kind, part in REASONING_PARTS
        ),
        ({"content": [ENCRYPTED, "x"]}, {"content": TEXT}),
        ({"content": "x", "reasoning": "hm"}, {"content": "x", **HM}),
        ({"content": "x", "reasoning_content": "hm"}, {"content": "x", **HM}),
        ({"content": "x", "reasoning": "hm", "reasoning_content": "o"}, {"content": "x", **HM}),
    ],
    ids=str,
)
def test_what_an_assistant_said_is_read(message: dict[str, Any], expected: Any) -> None:
    (read,) = Chat(messages=[{"role": "assistant", **message}]).messages
    assert read == {"role": "assistant", **expected}


def test_documents_are_an_argument_of_templates_that_take_it() -> None:
    chat = Chat.from_json({"messages": MESSAGES, "documents": [{"text": "one"}, {"text": "two"}]})
    source = "{% for document in documents %}{{ document.text }};{% endfor %}"
    assert ChatTemplate(source, {}).render(chat) == "one;two;"
    with pytest.raises(InvalidRequest, match=r"^documents: cannot be used"):
        ChatTemplate("No documents.", {}).render(chat)
    for none in (None, []):
        empty = Chat.from_json({"messages": MESSAGES, "documents": none})
        assert ChatTemplate("No documents.", {}).render(empty) == "No documents."


def test_results_need_no_call() -> None:
    for result in ({"content": "x", "tool_call_id": "other"}, {"content": "x"}, {}):
        assert Chat(messages=[{"role": "tool", **result}]).messages == [{"role": "tool", **result}]


def test_bytes_of_tokens_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    for text in CORPUS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(token_bytes(tokenizer, token) for token in ids).decode()
        assert joined.strip() == tokenizer.decode(ids).strip()


def test_bytes_of_a_token_may_be_part_of_a_character(
    byte_level: Tokenizer, byte_fallback: Tokenizer
) -> None:
    for tokenizer in (byte_level, byte_fallback):
        ids = tokenizer.encode("🦜", add_special_tokens=False)
        parts = [token_bytes(tokenizer, token) for token in ids]
        with pytest.raises(UnicodeDecodeError):
            parts[-1].decode()
        assert b"".join(parts).strip() == "🦜".encode()
    assert token_bytes(byte_level, 10**6) == b""


def test_bad_words_are_spelt_with_and_without_a_space(byte_level: Tokenizer) -> None:
    params = SamplingParams(bad_words=("the", " dog"), bad_words_token_ids=((1, 2),))
    resolved = resolve_bad_words(byte_level, params)
    assert resolved.bad_words == ()
    spelt = [byte_level.decode(ids) for ids in resolved.bad_words_token_ids[1:]]
    assert resolved.bad_words_token_ids[0] == (1, 2)
    assert spelt == ["the", " the", " dog"]
