"""Bad and strange requests for the OpenAI gateway, made by hypothesis, with what must come of them.

Every text that a case sends holds MARK, so that a log that holds any of them is found.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bad_requests import MARK, MARK_IDS, MARKED, MODEL, WORDS, WRONG
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

KEYS = (f"{MARK}-one", f"{MARK}-two", f"{MARK}-three")
KEY_FILE = f"alice {KEYS[0]}\nbob {KEYS[1]}\n{KEYS[2]}\n"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODY_TIMEOUT_S = 60.0  # for any answer; over it is a hang
_NO_LINGER = struct.pack("ii", 1, 0)  # closing resets the connection

Headers = tuple[tuple[bytes, bytes], ...]
_JSON: Headers = ((b"Content-Type", b"application/json"),)


@dataclass(frozen=True)
class Ask:
    """A request for one of two gateways, of which one asks for API keys.

    ``way`` says how the body is sent: ``whole``, ``chunked``, ``slow``, or one that ends early:
    ``cut``, ``reset`` (when all is sent) and ``leave`` (after the first bytes of the answer).
    ``named`` stands in the error, which is then a 400; ``statuses`` are those that may come.
    ``may_be_cut``: it may be refused, and the connection reset, before all of it is sent.
    """

    path: str = TEXT
    body: bytes = b""
    headers: Headers = _JSON
    method: str = "POST"
    way: str = "whole"
    keyed: bool = False
    named: str | None = None
    statuses: tuple[int, ...] = ()
    may_be_cut: bool = False

    def pieces(self) -> Iterator[bytes]:
        """The request's bytes as they are sent, one piece after the other."""
        lines = [b"%s %s HTTP/1.1" % (self.method.encode(), self.path.encode("utf-8", "replace"))]
        lines += [name + b": " + value for name, value in (*self._framing(), *self.headers)]
        yield b"\r\n".join(lines) + b"\r\n\r\n"
        draw = random.Random(len(self.body))
        cuts = sorted(draw.randrange(len(self.body) + 1) for _ in range(4))
        parts = [self.body[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
        if self.way == "chunked":
            yield b"".join(b"%x;x=y\r\n%s\r\n" % (len(part), part) for part in parts if part)
            yield b"0\r\n\r\n"
        elif self.way == "cut":
            yield b"".join(parts[: draw.randrange(5)])
        else:
            yield from parts

    def _framing(self) -> Headers:
        """The headers that say where the request ends, unless the case has them."""
        given = {name.lower() for name, _ in self.headers}
        framing: Headers = () if b"host" in given else ((b"Host", b"x"),)
        if not given & {b"content-length", b"transfer-encoding"}:
            length = (b"Content-Length", b"%d" % len(self.body))
            framing += ((b"Transfer-Encoding", b"chunked") if self.way == "chunked" else length,)
        return (*framing, (b"Connection", b"close"))


@dataclass(frozen=True)
class Bytes:
    """What is sent to a gateway in place of a request."""

    data: bytes
    keyed: bool = False


def send(case: Ask | Bytes, address: tuple[str, int]) -> bytes | None:
    """What comes back, None if the gateway resets the connection; raises OSError where it hangs.

    The connection is reset in the end, so that none stays open for the next case.
    """
    with socket.create_connection(address, timeout=BODY_TIMEOUT_S) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        try:
            _write(case, connection)
            if isinstance(case, Ask) and case.way == "reset":
                time.sleep(len(case.body) % 50 / 1000)  # so that it is at different moments
                return b""
            if isinstance(case, Ask) and case.way == "leave":
                return connection.recv(64) and b""
            return b"".join(iter(lambda: connection.recv(2**16), b""))
        except (BrokenPipeError, ConnectionResetError):
            return None  # refused before all was sent, and the answer is lost


def _end(connection: socket.socket) -> None:
    """Say that no more comes, to a gateway that may be gone by now."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)


def _write(case: Ask | Bytes, connection: socket.socket) -> None:
    if isinstance(case, Bytes):
        connection.sendall(case.data)
        _end(connection)
        return
    for piece in case.pieces():
        connection.sendall(piece)
        if case.way == "slow":
            time.sleep(0.02)
    if case.way == "cut":
        _end(connection)


# --- fields that have a wrong value ---------------------------------------------------------------

_HALVES = st.sampled_from(["\ud800", "\udc00", "\udfff\ud800"])
_half_text = st.builds(lambda a, b: f"{a}{MARK}{b}", st.sampled_from(["", "\ud83d"]), _HALVES)
_text = st.text(max_size=12).map(lambda text: MARK + text)
_LONG = _text.map(lambda text: text.ljust(300, "x"))
_containers = st.sampled_from([[], [MARK], {}, {MARK: MARK}, [[MARK]], [None], [{}], [[]]])
_HUGE = st.sampled_from([2**64, -(2**64), 10**30, 10**400, 1.5, 1e300, -0.5])
_NOT_INT = st.one_of(WORDS, st.booleans(), _containers, _HUGE)
_NOT_BOOL = st.one_of(WORDS, _containers, st.integers(), st.floats(width=16))
_NOT_TEXT = st.one_of(st.integers(), st.booleans(), st.floats(width=16), _containers, _half_text)
_MESSAGE = {"role": "user", "content": MARK}

# As in bad_requests, where null is a wrong value; here it stands for a field that is left out.
_SAME = sorted(
    set(WRONG) - {"max_tokens", "logprobs", "seed", "min_tokens", "best_of", "request_id"}
)
_WRONG_IN_BOTH: dict[str, SearchStrategy[Any]] = {
    **{name: WRONG[name] for name in _SAME},
    "seed": st.one_of(_NOT_INT, st.integers(2**64)),
    "min_tokens": st.one_of(_NOT_INT, st.integers(17, 2**40), st.integers(max_value=-1)),
    "max_tokens": st.one_of(_NOT_INT, st.integers(2049), st.integers(max_value=-1)),
    "model": st.one_of(st.integers(), st.booleans(), _containers, _half_text, _LONG),
    "stream": _NOT_BOOL,
    "stream_options": st.one_of(WORDS, st.booleans(), st.integers(), st.just([MARK])),
    "cache_salt": st.one_of(_NOT_TEXT, _LONG, st.just("")),
    **dict.fromkeys((f"{MARK}_{i}" for i in range(3)), st.one_of(WORDS, _containers)),
    **dict.fromkeys(("structured_outputs", "guided_json", "functions", "audio"), WORDS),
    **dict.fromkeys(("length_penalty", "response_format", "modalities"), WORDS),
}
_WRONG_PROMPTS = st.one_of(
    st.integers(), st.booleans(), _half_text, st.just([]), st.just({}), st.just([[]]),
    st.just([MARK, [1]]), st.just([[1], MARK]), st.just([1.5]), st.just([MARK] * 257),
    st.just([*MARK_IDS, 2048]), st.just([*MARK_IDS, -1]), st.just([*MARK_IDS, 2**31]),
    st.just([*MARK_IDS, True]), st.just([*MARK_IDS, 10**400]), st.just(MARK_IDS * 1100),
    st.just(f"{MARK} " * 3000), st.just([MARK, f"{MARK}\ud800"]), st.just({MARK: MARK}),
)  # fmt: skip
_WRONG_IN_TEXT = _WRONG_IN_BOTH | {
    "prompt": _WRONG_PROMPTS,
    "logprobs": st.one_of(_NOT_INT, st.integers(21), st.integers(max_value=-1)),
    "echo": _NOT_BOOL,
    "best_of": st.one_of(_NOT_INT, st.integers(2), st.integers(max_value=0)),
    "add_special_tokens": _NOT_BOOL,
    "messages": st.just([_MESSAGE]),
    "suffix": st.one_of(_text, st.integers()),
}
_WRONG_MESSAGES = st.one_of(
    st.integers(), _text, st.just([]), st.just({}), st.just([MARK]), st.just([None]),
    st.just([[_MESSAGE]]), st.just([_MESSAGE] * 4097),
    st.just([_MESSAGE | {"content": MARK * 9999}]),
    st.builds(
        lambda name, value: [_MESSAGE, _MESSAGE | {name: value}],
        st.sampled_from(["role", "content", "name"]), _NOT_TEXT,
    ).filter(lambda messages: messages[1]["content"] != []),
    st.builds(
        lambda name, value: [_MESSAGE | {name: value}],
        st.sampled_from(["tool_calls", "tool_call_id", "images", "function_call"]),
        st.one_of(WORDS.filter(bool), st.just([MARK])),
    ),
    st.builds(
        lambda part: [_MESSAGE | {"content": [{"type": "text", "text": MARK}, part]}],
        st.one_of(
            st.integers(), st.none(), st.just({}), st.just({"type": MARK, "text": MARK}),
            st.just({"type": "text"}), st.just({"type": "text", "text": [MARK]}),
            st.just({"type": "image_url", "image_url": {"url": f"file:///{MARK}"}}),
            _half_text.map(lambda text: {"type": "text", "text": text}),
        ),
    ),
)  # fmt: skip
_WRONG_IN_CHAT = _WRONG_IN_BOTH | {
    "messages": _WRONG_MESSAGES,
    "max_completion_tokens": st.one_of(_NOT_INT, st.integers(2**31), st.integers(max_value=0)),
    "logprobs": _NOT_BOOL,
    "top_logprobs": st.one_of(_NOT_INT, st.integers(1), st.integers(max_value=-1)),
    "add_special_tokens": st.one_of(_NOT_BOOL, st.just(True)),
    "add_generation_prompt": _NOT_BOOL,
    "continue_final_message": _NOT_BOOL,
    "chat_template_kwargs": st.one_of(WORDS, st.integers(), st.just([MARK]), st.just(True)),
    "prompt": _text,
    "tool_choice": _text,
}
_WRONG_IN_TOKENIZE: dict[str, SearchStrategy[Any]] = {
    "prompt": st.one_of(_NOT_TEXT, st.just(MARK_IDS), st.just(f"{MARK} " * 30_000)),
    "add_special_tokens": _NOT_BOOL,
    "messages": st.just([_MESSAGE]),  # beside a prompt
    "model": _WRONG_IN_BOTH["model"],
    "tokens": st.just(MARK_IDS),
    f"{MARK}\ud800": WORDS,
}
_WRONG_IN_DETOKENIZE: dict[str, SearchStrategy[Any]] = {
    "tokens": st.one_of(
        *(WORDS, st.integers(), st.just({}), st.just([MARK]), st.just([[1]]), st.just([True])),
        *(st.just([*MARK_IDS, 2048]), st.just([*MARK_IDS, -1]), st.just([2**31]), st.just([1.0])),
    ),
    "model": _WRONG_IN_BOTH["model"],
    "prompt": _text,
}
_BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [_MESSAGE], "max_tokens": 1},
    TEXT: {"prompt": MARK, "max_tokens": 1},
    "/tokenize": {"prompt": MARK},
    "/detokenize": {"tokens": MARK_IDS},
}
_WRONG_IN: dict[str, dict[str, SearchStrategy[Any]]] = {
    **{CHAT: _WRONG_IN_CHAT, TEXT: _WRONG_IN_TEXT},
    **{"/tokenize": _WRONG_IN_TOKENIZE, "/detokenize": _WRONG_IN_DETOKENIZE},
}
_PATHS = st.sampled_from([CHAT, TEXT, CHAT, TEXT, "/tokenize", "/detokenize"])


def _encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def _is_utf8(value: Any) -> bool:
    """Return False if a string in the value holds a half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _with_field(path: str, name: str, value: Any) -> Ask:
    """A body that is right but for this field."""
    body = _BASES[path] | {name: value}
    if name in ("logprobs", "top_logprobs", "min_tokens", "messages", "prompt"):
        return Ask(path, _encoded(body), statuses=(400,))
    if not _is_utf8(body):  # the parser refuses it before any field is known
        return Ask(path, _encoded(body), statuses=(400,))
    return Ask(path, _encoded(body), named=name, statuses=(404,) if name == "model" else ())


def _wrong_field_of(path: str) -> SearchStrategy[Ask]:
    return st.sampled_from(sorted(_WRONG_IN[path])).flatmap(
        lambda name: (
            _WRONG_IN[path][name]
            .filter(lambda value: value is not None)
            .map(lambda value: _with_field(path, name, value))
        )
    )


_wrong_fields = _PATHS.flatmap(_wrong_field_of)

# --- bodies that are no request -------------------------------------------------------------------

_SCALARS = [b"null", b"1", b"true", b"false", b"1.5", b"-0", b"1e999", b"NaN", b"-Infinity"]
_OTHERS = [
    *(b"", b" ", b"[]", b"[1]", b"[{}]", b"[null]", b"[[[]]]", b'""', b"{", b"}", b"{]", b"{}}"),
    *(b'"%s"' % MARKED, b'["%s"]' % MARKED, b"%s" % MARKED, b"'%s'" % MARKED, b"{%s: 1}" % MARKED),
    *(b"9" * 5000, b"-" + b"9" * 5000, b"1e" + b"9" * 400, b"\xff\xfe", b"\xef\xbb\xbf{}", b"\0"),
    *(b'{"prompt": "%s\xff"}' % MARKED, b'{"%s\xc3": 1}' % MARKED, b'"%s' % MARKED),
    *(b'"\\ud800%s"' % MARKED, b'["\\udc00%s"]' % MARKED, b'{"prompt": "%s\\u12"}' % MARKED),
]


def _at_depth(depth: int, opening: str, closing: str, closed: bool) -> str:
    """A value that is nested so deep."""
    return opening * depth + f'"{MARK}"' + closing * depth * closed


_DEEP = st.builds(
    _at_depth,
    st.sampled_from([30, 31, 32, 33, 900, 1000, 10_000, 100_000]),
    *(st.just("["), st.just("]"), st.booleans()),
) | st.builds(
    _at_depth,
    st.sampled_from([30, 31, 32, 33, 330, 1000, 10_000, 50_000]),
    *(st.sampled_from(['{"a": ', f'{{"{MARK}": ', '[{"": ']), st.just("}"), st.booleans()),
)


def _list_of(item: str, number: int) -> str:
    """JSON of a list that has the same item so many times."""
    return f"[{','.join([item] * number)}]"


_MANY = st.sampled_from(
    [
        *(_list_of("[]", 200_000), _list_of("{}", 100_000), _list_of("1", 300_000)),
        *(_list_of(json.dumps(MARK), 50_000), f"[{_list_of('[1]', 100_000)}]"),
        *(_list_of(json.dumps({"role": MARK, "content": ""}), 9999), _list_of("[1, 2]", 9999)),
        *(
            _list_of(json.dumps({MARK: 1}), 9999),
            json.dumps({f"{MARK}{n}": n for n in range(20_000)}),
        ),
        *(json.dumps(MARK * 40_000), json.dumps("\U0001f600" * 20_000)),
        json.dumps([_MESSAGE | {f"{'temprature' * 6}{n}": 1} for n in range(900)]),
    ]
)
_CONTAINING = [
    *("prompt", "messages", "metadata", "stop", "logit_bias", "chat_template_kwargs", "user"),
    *("tokens", "stop_token_ids", "allowed_token_ids", "bad_words", "tools", "guided_json", MARK),
    *("stream_options", "model", "cache_salt", "response_format", "n", "seed", "documents"),
]


def _holding(path: str, name: str, value: str) -> Ask:
    """A body with this JSON as one of its fields, in front of what else it has or behind it."""
    rest = {key: item for key, item in _BASES[path].items() if key != name}
    text = json.dumps(rest)[1:-1]
    text = f'"{name}": {value}' + (f", {text}" if text else "")
    return Ask(path, b"{%s}" % text.encode(errors="replace"))


_long_names = st.builds(
    lambda path, name, length, value: Ask(
        path, _encoded(_BASES[path] | {name.ljust(length, "e"): value}), statuses=(200, 400)
    ),
    _PATHS,
    st.sampled_from([MARK, f"temperatur{MARK}", f"\U0001f600{MARK}", f"{MARK}\ud800", f" {MARK}"]),
    st.sampled_from([1, 63, 64, 65, 66, 1000, 500_000]),
    st.sampled_from([1, None, MARK, [], {MARK: 1}]),
)
_many_fields = st.builds(
    lambda path, name, number: Ask(
        path, _encoded(_BASES[path] | {f"{name}{n}": MARK for n in range(number)}), statuses=(400,)
    ),
    *(_PATHS, st.sampled_from([MARK, "temprature", "max_token", ""])),
    st.sampled_from([2, 100, 10_000]),
)
_half_keys = st.builds(
    lambda path, name, where: Ask(path, _encoded(_put(_BASES[path], where, name))),
    *(_PATHS, _half_text),
    st.sampled_from(
        [
            *("", "stream_options", "logit_bias", "chat_template_kwargs", "metadata"),
            *("response_format", "tools", MARK, "messages", "prompt", "model", "stop"),
        ]
    ),
)


def _put(base: dict[str, Any], where: str, name: str) -> dict[str, Any]:
    """The body with a field of that name in it, or in one of its objects."""
    inner: dict[str, Any] = {name: 1}
    if where == "messages":
        return base | {where: [_MESSAGE | inner]}
    return base | ({where: inner, "stream": True} if where else inner)


_INTS = ["n", "top_k", "seed", "max_tokens", "logprobs", "priority", "min_tokens", "timeout_s"]
_huge_numbers = st.builds(
    _holding,
    *(_PATHS, st.sampled_from([*_INTS, "temperature", "prompt", "tokens", MARK])),
    st.sampled_from(
        [
            *("9" * 4299, "9" * 4300, "9" * 4301, "-" + "9" * 4000),
            *("9" * 60_000, "1e400", "-1e400"),
            *("1" + "0" * 309, "0." + "1" * 9999, "1e-99999", "NaN"),
            *("Infinity", "[" + "9" * 400 + "]"),
            *('{"5": ' + "9" * 400 + "}", "-0", "-0.0", "0e0", "00"),
            *("1_0", "0x1", "+1", ".5", "1."),
        ]
    ),
)
_junk_values: SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), _text, _half_text),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(_text, _half_text), inner, max_size=4),
    ),
    max_leaves=10,
)
_junk_fields = st.builds(
    lambda path, fields: Ask(path, _encoded(_BASES[path] | fields | {"timeout_s": 20})),
    _PATHS,
    st.dictionaries(
        st.sampled_from([*_WRONG_IN_CHAT, *_WRONG_IN_TEXT, "user", "metadata"]).filter(
            lambda name: name not in ("n", "max_tokens", "max_completion_tokens")  # only takes long
        ),
        _junk_values,
        max_size=4,
    ),
)
_twice = st.builds(
    lambda path, name, one, other: Ask(
        path, _encoded(_BASES[path])[:-1] + b', "%s": %s, "%s": %s}' % (name, one, name, other)
    ),
    _PATHS,
    st.sampled_from([b"prompt", b"messages", b"model", MARKED, b"", b"n", b"temperature"]),
    *[st.sampled_from([b"null", b"1", b'"%s"' % MARKED, b"[]", b"{}", b'"\\ud800"'])] * 2,
)
_no_requests = st.builds(
    lambda path, body: Ask(path, body, statuses=(400,)),
    *(_PATHS, st.sampled_from(_SCALARS + _OTHERS)),
) | st.builds(lambda path, body: Ask(path, body, statuses=(400,)), _PATHS, st.binary(max_size=60))
_large = st.builds(_holding, _PATHS, st.sampled_from(_CONTAINING), st.one_of(_DEEP, _MANY))

# --- right requests with strange values -----------------------------------------------------------

_FINE = (200, 400, 504)
_STRANGE = st.sampled_from(
    [
        *(MARK, f"{MARK}\0", f"\0\x01\x1b[31m{MARK}\x7f", f"\u202e{MARK}\ufeff", f"{MARK}\r\n\r\n"),
        *(f"\U0001f468\u200d\U0001f469{MARK}", f"{MARK}" + "\u0301" * 99, f"<|end|>{MARK}<|user|>"),
        *(f"{{{{ {MARK} }}}}{{% for x in y %}}", f"{MARK}\ufffd\ufffe\uffff", f"%s%n{{0}}{MARK}"),
        *(f"{MARK}\u2028\u2029\x85", f"data: {MARK}\n\ndata: [DONE]\n\n"),
        *(f"{MARK} " * 300, f" {MARK}"),
        *("\U0010ffff" + MARK, f"${{jndi:{MARK}}}", f"'; DROP TABLE {MARK};--"),
        f"{MARK}\ud7ff\ue000",
    ]
)
_strange_sampling: SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 8)},
    optional={
        "model": st.sampled_from([MODEL, None]),
        "stream": st.booleans(),
        "n": st.integers(1, 3),
        "temperature": st.sampled_from([0, 0.0, 1e-300, 5e-324, 0.7, 99.999, 100]),
        "top_k": st.sampled_from([-1, 0, 1, 2047, 2048, 2**31 - 1]),
        "top_p": st.sampled_from([1e-300, 0.5, 1, 1.0]),
        "min_p": st.sampled_from([0, 5e-324, 0.5, 1]),
        "repetition_penalty": st.sampled_from([1e-300, 0.5, 1, 100]),
        "presence_penalty": st.sampled_from([-2, 0, 2]),
        "frequency_penalty": st.sampled_from([-2, -0.0, 2]),
        "seed": st.sampled_from([0, -1, -(2**63), 2**63, 2**64 - 1]),
        "min_tokens": st.sampled_from([0, 1]),
        "ignore_eos": st.booleans(),
        "stop": st.one_of(_STRANGE.map(lambda text: text[:256]), st.just([MARK] * 16), st.just([])),
        "stop_token_ids": st.sampled_from([[], [0], [2047], [5] * 256]),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "logit_bias": st.sampled_from([{}, {"0": -100}, {"2047": 100, "0002047": -1}, {"5": 0.5}]),
        "allowed_token_ids": st.sampled_from([[7], [0, 2047], MARK_IDS * 500]),
        "bad_words": st.sampled_from([[], [MARK], [" "], [f"{MARK}\0"], ["\u0301"]]),
        "priority": st.sampled_from([-1, 0, 5, 2**31 - 1]),
        "cache_salt": st.one_of(_text, _STRANGE.map(lambda text: text[:256])),
        "tenant": st.one_of(_text, st.just(""), _STRANGE.map(lambda text: text[:256])),
        "timeout_s": st.sampled_from([5e-324, 1e-9, 0.001, 0.05, 5, 86400]),
        "user": _STRANGE,
        "metadata": st.dictionaries(_text, _junk_values, max_size=2),
        "stream_options": st.sampled_from([{}, {"include_usage": True}, None]),
        "prompt_logprobs": st.sampled_from([0, 20, None]),
    },
)
_ids = st.lists(st.integers(0, 2047), max_size=9).map(lambda ids: MARK_IDS + ids)
_strange_texts = st.builds(
    lambda sampling, more: Ask(TEXT, _encoded(sampling | more), statuses=_FINE),
    _strange_sampling,
    st.fixed_dictionaries(
        {"prompt": st.one_of(_STRANGE, _ids, st.lists(_STRANGE, min_size=1, max_size=4))},
        optional={
            "echo": st.booleans(),
            "logprobs": st.sampled_from([0, 1, 20]),
            "best_of": st.sampled_from([1, None]),
            "max_tokens": st.sampled_from([0, 1, None]),
            "add_special_tokens": st.booleans(),
            "suffix": st.just(""),
        },
    ),
)
_roles = st.one_of(st.sampled_from(["user", "system", "assistant", "tool"]), _text)
_turns = st.builds(
    lambda role, content, more: {"role": role[:64], "content": content} | more,
    _roles,
    st.one_of(
        _STRANGE,
        st.lists(_STRANGE.map(lambda text: {"type": "text", "text": text}), max_size=3),
    ),
    st.fixed_dictionaries(
        {}, optional={"name": _text, "refusal": st.none(), "tool_calls": st.just([])}
    ),
)
_TEMPLATE_NAMES = [
    *("messages", "conversations", "tools", "documents", "chat_template", "bos_token", "self"),
    *("return_dict", "kwargs", "args", "raise_exception", "tokenize"),
    "return_assistant_tokens_mask",
    *("strftime_now", "message", "loop", "__class__", "", MARK),
    *(f"{MARK}-x", "eos_token", "namespace"),
]
_rendering: SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "add_generation_prompt": st.booleans(),
        "continue_final_message": st.booleans(),
        "chat_template_kwargs": st.dictionaries(
            st.sampled_from(_TEMPLATE_NAMES), _junk_values, max_size=3
        ),
    },
)
_messages = st.lists(_turns, min_size=1, max_size=4)
_strange_chats = st.builds(
    lambda sampling, messages, rendering, more: Ask(
        CHAT, _encoded(sampling | {"messages": messages} | rendering | more), statuses=_FINE
    ),
    *(_strange_sampling, _messages, _rendering),
    st.fixed_dictionaries(
        {},
        optional={
            "logprobs": st.booleans(),
            "top_logprobs": st.sampled_from([0, 1, 20]),
            "max_completion_tokens": st.integers(1, 4),
            "tools": st.just([]),
            "response_format": st.just({"type": "text"}),
        },
    ),
)
_strange_tokens = st.one_of(
    _STRANGE.map(lambda text: Ask("/tokenize", _encoded({"prompt": text}), statuses=(200,))),
    st.builds(
        lambda messages, rendering: Ask(
            "/tokenize", _encoded({"messages": messages} | rendering), statuses=(200, 400)
        ),
        *(_messages, _rendering),
    ),
    _ids.map(lambda ids: Ask("/detokenize", _encoded({"tokens": ids}), statuses=(200,))),
    st.just(Ask("/detokenize", _encoded({"tokens": MARK_IDS * 40_000}))),
)

# --- routes, methods, headers ---------------------------------------------------------------------

_METHODS = ["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "PATCH", "POST", "CONNECT", MARK]
_ROUTES = [
    *("/", f"/{MARK}", "/v1", "/v1/", "/v1/models", "/v1/models/", f"/v1/models/{MARK}", "/health"),
    *("/metrics", "/docs", "/openapi.json", "/docs/oauth2-redirect", "/redoc", "//v1/models", "*"),
    *(f"/v1/models/{MODEL}", f"/v1/models/{MODEL}/{MARK}", f"/v1/models/{MODEL}%00{MARK}"),
    *(f"/v1/models/%ff%fe{MARK}", f"/v1/models/..%2f{MARK}"),
    *(f"/v1/models/{MARK * 900}", "/v1/models?"),
    *(f"/v1/models/%F0%9F%98%80{MARK}", f"/v1/models/%ed%a0%80{MARK}"),
    f"/v1/models/%0d%0a{MARK}: 1",
    *(f"/../../{MARK}", f"/%2e%2e/{MARK}", f"/v1/completions?{MARK}={MARK}"),
    f"http://{MARK}/health",
    *(f"/health?{MARK}", f"/health#{MARK}", f"/health/{MARK}"),
    *(f"/v1/completions/{MARK}", "/;", "\\"),
    *(f"/static/{MARK}", "/v1/embeddings", "/v1/responses"),
    *(f"/v1/files/{MARK}", "/tokenize/", "/%"),
]
_routes = st.builds(
    lambda method, path, body: Ask(path, body, method=method, may_be_cut=True),
    *(st.sampled_from(_METHODS), st.sampled_from([*_ROUTES, CHAT, TEXT, "/tokenize"])),
    st.sampled_from([b"", b"{}", b'{"prompt": "%s"}' % MARKED]),
)
_TYPES = [
    *(b"text/plain", b"", MARKED, b"multipart/form-data; boundary=" + MARKED),
    b"multipart/form-data",
    *(b"application/x-www-form-urlencoded", b"application/json; charset=utf-16", b"*/*", b"json"),
    *(b"application/json; charset=" + MARKED, b"application/vnd.api+json", b"application/JSON ;;"),
    *(b"application/json\xff" + MARKED, b"application/octet-stream", b"text/json", b"a" * 9000),
]
_MORE_HEADERS = [
    *((b"X-" + MARKED, MARKED), (b"X-Request-Id", MARKED), (b"Cookie", MARKED + b"=" + MARKED)),
    *((b"Content-Encoding", b"gzip"), (b"Expect", b"100-continue"), (b"Expect", MARKED)),
    *((b"Upgrade", b"websocket"), (b"Upgrade", b"h2c")),
    *((b"Connection", b"Upgrade"), (b"TE", MARKED)),
    *((b"Host", MARKED), (b"Host", b"a, b"), (b"Host", b"x:99999"), (b"Host", b"\xff" + MARKED)),
    *((b"X-Forwarded-For", MARKED), (b"Forwarded", b"for=" + MARKED), (b"Range", b"bytes=0-1")),
    *((b"Accept", MARKED), (b"Accept-Encoding", MARKED), (b"Origin", b"null"), (b"X", b"")),
    *((b"Authorization", b"Bearer " + MARKED), (b"X", b"y" * 20_000), (b"X", MARKED * 6000)),
    *((b"Content-Length", b"0"), (b"Content-Length", b"-1"), (b"Content-Length", b"+5")),
    *((b"Content-Length", b"9" * 20), (b"Content-Length", b"9" * 5000)),
    (b"Content-Length", MARKED),
    *((b"Content-Length", b"1, 1"), (b"Content-Length", b"\xb2"), (b"Content-Length", b"5_0")),
    *((b"Transfer-Encoding", b"chunked"), (b"Transfer-Encoding", b"gzip, chunked")),
    *((b"Transfer-Encoding", MARKED), (b"Bad Name", MARKED), (b"", MARKED), (b"X\0", MARKED)),
    *((b"X", MARKED + b"\0"), (b"X", b" \r\n " + MARKED), (b"X", MARKED + b"\r"), (b"X", b"\x7f")),
    *((b"Traceparent", MARKED), (b"Trailer", MARKED), (b"X-HTTP-Method-Override", b"DELETE")),
]
_headers = st.lists(
    st.one_of(
        st.sampled_from(_MORE_HEADERS), st.sampled_from(_TYPES).map(lambda t: (b"Content-Type", t))
    ),
    min_size=1,
    max_size=4,
).flatmap(
    # Some of them twice, and the right type behind them or not.
    lambda some: st.builds(
        lambda again, typed: (*some, *some[:again], *(_JSON if typed else ())),
        *(st.integers(0, 2), st.booleans()),
    )
)
_UTF_16 = _encoded(_BASES[TEXT]).decode().encode("utf-16")
_BODIES = [_encoded(_BASES[TEXT]), b"{}", _UTF_16, b"prompt=%s" % MARKED, b"\x1f\x8b" + MARKED]


def _has_strange(path: str, headers: Headers, body: bytes, method: str) -> Ask:
    """The gateway would wait for the end of a body that says it is chunked and is not."""
    says_chunked = any(name == b"Transfer-Encoding" for name, _ in headers)
    way = "cut" if says_chunked else "whole"
    return Ask(path, body, headers, method, way, may_be_cut=True)


_strange_headers = st.builds(
    _has_strange,
    *(st.sampled_from([TEXT, CHAT, "/v1/models"]), _headers, st.sampled_from(_BODIES)),
    st.sampled_from(["POST", "POST", "POST", "GET", MARK]),
)
_many_headers = st.integers(90, 400).map(
    lambda number: Ask(
        TEXT,
        _BODIES[0],
        (*_JSON, *[(b"X-%d" % index, MARKED) for index in range(number)]),
        may_be_cut=True,
    )
)
_AUTHORIZATIONS = [
    *(b"Bearer", b"Bearer ", b"Bearer " + MARKED, b"Basic " + KEYS[0].encode(), KEYS[0].encode()),
    *(b"Bearer " + KEYS[0].encode()[:-1], b"Bearer " + KEYS[0].encode() + b"x"),
    b"Bearer \xff" + MARKED,
    b"Bearer " + b", ".join(key.encode() for key in KEYS),
    *(b"Bearer " + MARKED * 5000, b"", b"\xff"),
    *(b"Bearer\t" + KEYS[0].encode(), b"Bearer  " + KEYS[1].encode() + b" x", b"Token " + MARKED),
]
_wrong_keys = st.builds(
    lambda ask, value: replace(
        ask,
        keyed=True,
        headers=(*_JSON, (b"Authorization", value)),
        named=None,
        statuses=(401,),
        may_be_cut=True,
    ),
    *(_strange_texts, st.sampled_from(_AUTHORIZATIONS)),
)
_no_keys = _wrong_fields.map(
    lambda ask: replace(
        ask, keyed=True, headers=_JSON, named=None, statuses=(401,), may_be_cut=True
    )
)

# --- what is no HTTP ------------------------------------------------------------------------------

_LINES = st.sampled_from(
    [
        *(b"GET / HTTP/1.1", b"GET /%s HTTP/9.9" % MARKED),
        *(b"GET  / HTTP/1.1", b"POST /tokenize HTTP/1.0"),
        *(b"%s" % MARKED, b"", b"\0", b"PRI * HTTP/2.0"),
        *(b"GET /%s\xff HTTP/1.1" % MARKED, b"GET /"),
        *(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"A" * 70_000),
        *(b"GET / HTTP/1.1\n\n", b"\r"),
        *(b"GET /" + MARKED * 9000 + b" HTTP/1.1", b"SSH-2.0-" + MARKED),
        b"POST /v1/completions HTTP/1.1",
    ]
)
_HEADS = st.sampled_from(
    [
        *(b"Host: x", b"Host:", MARKED, b": ", b" " + MARKED),
        *(b"X: " + MARKED, b"Content-Length: 100"),
        *(b"Transfer-Encoding: chunked", b"Content-Length: 5"),
        *(b"Expect: 100-continue", b"\xff: \xff"),
        *(b"Content-Type: application/json", b"X" * 40_000),
        *(b"Connection: close", b"X: y\nZ: " + MARKED),
    ]
)
_ENDS = st.sampled_from(
    [
        *(b"", MARKED, b"5\r\n%s" % MARKED, b"zz\r\n{}\r\n", b"-1\r\n"),
        b"ffffffffffffffffff\r\n{}\r\n",
        *(b"2\r\n{}\r\n0\r\n\r\n", b"2\r\n{}\r\n0\r\nX: %s\r\n\r\n" % MARKED),
        *(b"2\r\n{}x", b"0;" + b"x" * 9999),
        b"2\r\n{}\r\n0\r\n\r\nGET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % MARKED,
        *(b"f" * 999, b"\0" * 99),
    ]
)
_bytes = st.one_of(
    st.binary(max_size=200).map(lambda data: Bytes(data + MARKED)),
    st.builds(
        lambda line, heads, end: Bytes(b"\r\n".join([line, *heads, b"", end])),
        *(_LINES, st.lists(_HEADS, max_size=4), _ENDS),
    ),
)

# --- all of them ----------------------------------------------------------------------------------


def _any_of(*kinds: SearchStrategy[Any]) -> SearchStrategy[Any]:
    """One of these, each as often as the others; ``one_of`` counts what is inside of them."""
    return st.integers(0, len(kinds) - 1).flatmap(kinds.__getitem__)


_asks = _any_of(
    *(_wrong_fields, _wrong_fields, _no_requests, _large, _long_names, _many_fields, _half_keys),
    *(_huge_numbers, _junk_fields, _twice, _strange_texts, _strange_chats, _strange_tokens),
)
_WAYS = ["whole", "whole", "whole", "chunked", "slow", "cut", "reset", "leave"]


def _sent(ask: Ask, way: str, key: int | None) -> Ask:
    """The case sent in that way, with one of the API keys or to the gateway without."""
    if key is not None:
        bearer = (b"Authorization", b"Bearer " + KEYS[key].encode())
        ask = replace(ask, keyed=True, headers=(*ask.headers, bearer))
        if ask.statuses == (200,):
            ask = replace(ask, statuses=(200, 400))  # a tenant is the key's
    return replace(ask, way=way)


_sent_asks = st.builds(
    _sent,
    _any_of(_asks, _asks, _asks, _routes),
    st.sampled_from(_WAYS),
    st.sampled_from([None, None, 0, 1, 2]),
)
GATEWAY_CASES: SearchStrategy[Ask | Bytes] = _any_of(
    *[_sent_asks] * 8,
    *(_strange_headers, _strange_headers, _many_headers, _wrong_keys, _no_keys),
    st.builds(lambda case, keyed: replace(case, keyed=keyed), _bytes, st.booleans()),
)
