"""Requests that no client should send, made by hypothesis, with what their error has to name.

Some kill tritonserver 24.10 before any code of ours sees them, so they are not made; SECURITY.md
has the same list:

- the gRPC header ``triton_grpc_error`` on a stream (the server ends),
- a JSON body that is nested a million times (its parser recurses until the stack is full),
- a body in a million chunks (their list goes on the stack),
- dimensions whose product overflows 64 bits (the stub ends over the array's shape),
- the parameter ``classification`` of an output (the server ends).
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tritonclient.grpc import service_pb2

MODEL = "paged_llm"
PATH = f"/v2/models/{MODEL}"
# A word in the texts of all cases, so that a log that holds any of them is found.
MARK = "quagga"
MARKED = MARK.encode()
# The same as token ids: two of them side by side are in no log by chance.
MARK_IDS = [1931, 1733]


@dataclass(frozen=True)
class Post:
    """A body for HTTP; ``named`` stands in its error, and where that is None it may be answered."""

    verb: str
    body: bytes
    named: str | None = None


@dataclass(frozen=True)
class Infer:
    """A message for a gRPC stream."""

    message: Any
    named: str | None = None


@dataclass(frozen=True)
class Raw:
    """Bytes for one of the ports, whatever they are."""

    port: str  # http or grpc
    data: bytes


Case = Post | Infer | Raw

# --- values that a field does not take ------------------------------------------------------------


def _one_of(values: list[Any]) -> SearchStrategy[Any]:
    """As sampled_from, but long values are no part of the strategy's name."""
    return st.integers(0, len(values) - 1).map(lambda index: values[index])


WORDS = _one_of(
    ["", MARK, "1.5.2", "0x10", "--1", "None", f"[{MARK}]", "1,5", f"{MARK} 日本", MARK * 150]
)
_LONG_NAME = MARK.ljust(257, "x")
_CONTAINERS: SearchStrategy[Any] = st.sampled_from([[], [MARK], {}, {MARK: MARK}, [[MARK]], [None]])


# Null is none of them: it means the same as no value.
def _not_integer(low: int, high: int) -> SearchStrategy[Any]:
    wrong = [WORDS, st.booleans(), _CONTAINERS, st.floats(width=32), st.integers(high + 1)]
    return st.one_of(*wrong, st.integers(max_value=low - 1))


def _not_number(low: float, high: float, *, above: bool = False) -> SearchStrategy[Any]:
    over = st.floats(high, exclude_min=True)
    under = st.floats(max_value=low, exclude_max=not above)
    return st.one_of(WORDS, st.booleans(), _CONTAINERS, over, under, st.just(float("nan")))


_NOT_BOOLEAN = st.one_of(WORDS, _CONTAINERS, st.integers(), st.floats(width=16))
_NOT_TOKENS = st.one_of(
    *(WORDS, st.integers(), st.booleans(), st.just({}), _one_of([[1] * (2**18 + 1)])),
    st.lists(st.one_of(WORDS, st.none(), st.booleans(), st.integers(max_value=-1)), min_size=1),
    st.lists(st.integers(2048), min_size=1, max_size=3),
)
_HALF = st.just(f"{MARK}\ud800")  # a half surrogate, which JSON can hold and UTF-8 cannot
_NOT_STRINGS = st.one_of(
    *(st.integers(), st.booleans(), st.just({}), st.just(""), st.just(_LONG_NAME)),
    st.lists(st.one_of(st.integers(), st.none(), st.just(""), _HALF), min_size=1),
    st.just([MARK] * 129),
)
_NOT_BIASES = st.one_of(
    *(WORDS, st.integers(), st.booleans(), st.just([1]), st.just([[1, 2, 3]])),
    st.dictionaries(WORDS, st.integers(-1, 1), min_size=1),
    st.dictionaries(st.integers(2048).map(str), st.integers(-1, 1), min_size=1, max_size=3),
    st.dictionaries(st.just("1"), _not_number(-100, 100), min_size=1),
    _one_of([{str(token): 1 for token in range(1025)}]),
)
_NOT_NAME = st.one_of(st.integers(), st.booleans(), _CONTAINERS, st.just(_LONG_NAME), _HALF)

# What each sampling field does not take, written without a look at the code that checks it.
WRONG: dict[str, SearchStrategy[Any]] = {
    "n": _not_integer(1, 64),
    "beam_width": _not_integer(1, 8),
    "top_k": _not_integer(-1, 2**31 - 1),
    "seed": _not_integer(-1, 2**64 - 1),  # -1 is none
    "max_tokens": _not_integer(1, 2048),
    "min_tokens": _not_integer(0, 16),  # max_tokens is 16 by default
    "logprobs": _not_integer(0, 20),
    "prompt_logprobs": _not_integer(0, 20),
    "priority": _not_integer(-(2**31) + 1, 2**31 - 1),
    "temperature": _not_number(0, 100),
    "top_p": _not_number(0, 1, above=True),
    "min_p": _not_number(0, 1),
    "repetition_penalty": _not_number(0, 100, above=True),
    "presence_penalty": _not_number(-2, 2),
    "frequency_penalty": _not_number(-2, 2),
    "timeout_s": _not_number(0, 86400, above=True),
    "ignore_eos": _NOT_BOOLEAN,
    "include_stop_str_in_output": _NOT_BOOLEAN,
    "skip_special_tokens": _NOT_BOOLEAN,
    "stop_special_tokens": _NOT_BOOLEAN,
    "stop": _NOT_STRINGS,
    "bad_words": _NOT_STRINGS,
    "stop_token_ids": _NOT_TOKENS,
    "allowed_token_ids": _NOT_TOKENS,
    "bad_words_token_ids": st.one_of(_NOT_TOKENS, st.just([[]]), st.just([[1] * 65])),
    "logit_bias": _NOT_BIASES,
    "cache_salt": _NOT_NAME,
    "tenant": _NOT_NAME,
    **{name: st.just(2) for name in ("guided_json", "tools", "best_of")},
    **{name: st.just(1) for name in ("temprature", MARK, "__class__", "request_id")},
}
# Over HTTP and as a parameter of gRPC a field can be a scalar, unless Triton gives it a meaning.
_AS_SCALAR = sorted(set(WRONG) - {"stop", "bad_words", "stop_token_ids", "allowed_token_ids"})
_TRITON_S_OWN = {"priority", "timeout_s"}

_wrong_field = st.sampled_from(sorted(WRONG)).flatmap(
    lambda name: st.tuples(st.just(name), WRONG[name])
)


def _is_scalar(value: Any) -> bool:
    """Whether Triton's JSON and gRPC parameters can hold it."""
    if isinstance(value, float):
        return abs(value) < 1e300  # neither NaN nor infinite
    if isinstance(value, str):
        return not any("\ud800" <= character < "\ue000" for character in value)
    return isinstance(value, (bool, int)) and -(2**63) <= value < 2**63


_wrong_scalar = (
    st.sampled_from(_AS_SCALAR)
    .flatmap(lambda name: st.tuples(st.just(name), WRONG[name]))
    .filter(lambda pair: _is_scalar(pair[1]))
)

# --- prompts --------------------------------------------------------------------------------------

_MESSAGE = {"role": "user", "content": MARK}
_WRONG_MESSAGES = _one_of(
    [
        *("", "[", "[]", "3", "{}", f'"{MARK}"', "[3]", "[{}]", '[{"role": 3}]', "[" * 99999),
        *("null", f'[{{"role": "{MARK}"}}]', f'[{{"role": "{MARK}", "content": 3}}]'),
        *('{"messages": 1}', f'{{"{MARK}": "{MARK}"}}', MARK, f'[{{"{MARK}\\ud800": 1}}]'),
        json.dumps([_MESSAGE] * 5000),
        json.dumps([_MESSAGE | {"tool_calls": [{MARK: MARK}]}]),
        json.dumps([_MESSAGE | {"content": [{"type": MARK}]}]),
        '[{"role": "user", "content": ' + "[" * 50 + "]" * 50 + "}]",
    ]
)
_WRONG_PROMPTS: SearchStrategy[tuple[dict[str, Any], str]] = st.one_of(
    st.just(({}, "text_input")),
    st.just(({"text_input": MARK, "input_ids": MARK_IDS}, "text_input")),
    st.just(({"text_input": ""}, "prompt")),
    st.just(({"input_ids": []}, "prompt")),
    st.just(({"text_input": MARK, "image": [MARK]}, "image")),
    st.just(({"text_input": MARK, "embedding_request": MARK}, "embedding_request")),
    st.just(({"text_input": MARK, "task": "embed"}, "task")),
    st.integers(2048, 9999).map(
        lambda n: ({"input_ids": MARK_IDS * (n // 2 + 1)}, "p")
    ),  # prompt or input_ids
    st.integers(3000, 9999).map(lambda n: ({"text_input": f"{MARK} " * n}, "max_model_len")),
    st.integers(-(2**31), -1).map(lambda token: ({"input_ids": [*MARK_IDS, token]}, "token ids")),
    st.integers(2048, 2**31 - 1).map(
        lambda token: ({"input_ids": [token, *MARK_IDS]}, "token ids")
    ),
    _WRONG_MESSAGES.map(lambda text: ({"messages": text}, "messages")),
    _one_of([f"{MARK} " * 5000, f"{MARK}\ud800"]).map(
        lambda text: ({"messages": json.dumps([_MESSAGE | {"content": text}])}, "prompt")
    ),
    WORDS.map(lambda word: ({"text_input": MARK, "task": word}, "task")),
    st.sampled_from(["", f"{MARK} b", MARK * 11, f"{MARK}é", f"../{MARK}"]).map(
        lambda name: ({"text_input": MARK, "call_id": name}, "call_id")
    ),
    st.just(
        ({"text_input": MARK, "stream": True, "exclude_input_in_output": False}, "When streaming")
    ),
)

# --- over HTTP ------------------------------------------------------------------------------------

_VERBS = st.sampled_from(["generate", "generate_stream"])
_DEEP = ["[" * 1000, "[" * 10**5, '{"a":' * 1000, "[" * 9000 + "]" * 9000, "9" * 5000, "1e999"]
_TEXT = st.one_of(st.text(max_size=8), st.text(max_size=8).map(lambda text: MARK + text), _HALF)
_JUNK_JSON: SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), _TEXT),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(st.sampled_from([*sorted(WRONG), "role", "content"]), _TEXT),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)
_JUNK_TEXT = st.one_of(
    *(_JUNK_JSON.map(json.dumps), st.text(max_size=40).map(lambda text: MARK + text)),
    *(st.text(max_size=40), _one_of(_DEEP)),
)

_BAD_UTF8 = st.sampled_from([b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", MARKED + b"\x80"])


def _in_a_body(text: bytes) -> bytes:
    """A body with that as the value of a parameter, which Triton passes on as it is."""
    return b'{"text_input": "%s", "max_tokens": 1, "%s": "%s"}' % (MARKED, b"cache_salt", text)


def _post(verb: str, fields: dict[str, Any], named: str | None) -> Post:
    return Post(verb, json.dumps(fields).encode(), named)


def _with_sampling(values: dict[str, Any]) -> dict[str, Any]:
    return {"text_input": MARK, "sampling_parameters": json.dumps(values)}


POSTS = st.one_of(
    st.builds(
        lambda verb, field: _post(verb, _with_sampling(dict([field])), field[0]),
        _VERBS,
        _wrong_field,
    ),
    st.builds(
        lambda verb, field: _post(verb, {"text_input": MARK, **dict([field])}, field[0]),
        _VERBS,
        _wrong_scalar,
    ),
    st.builds(lambda verb, prompt: _post(verb, *prompt), _VERBS, _WRONG_PROMPTS),
    st.builds(
        lambda verb, text: _post(verb, {"text_input": MARK, "sampling_parameters": text}, None),
        _VERBS,
        _JUNK_TEXT,
    ),
    st.builds(
        lambda verb, values: _post(verb, {"max_tokens": 1} | values, None),
        _VERBS,
        st.dictionaries(
            st.sampled_from(["text_input", "input_ids", "messages", "stream", "task", *WRONG]),
            _JUNK_JSON,
            max_size=5,
        ),
    ),
    st.builds(Post, _VERBS, st.binary(max_size=200)),
    st.builds(lambda verb, text: Post(verb, _in_a_body(text)), _VERBS, _BAD_UTF8),
    st.builds(Post, _VERBS, _JUNK_TEXT.map(lambda text: text.encode(errors="replace"))),
)

# --- over gRPC ------------------------------------------------------------------------------------

_ITEM_SIZES = {
    **{"BOOL": 1, "UINT8": 1, "INT8": 1, "UINT16": 2, "INT16": 2, "FP16": 2, "BF16": 2},
    **{"INT32": 4, "UINT32": 4, "FP32": 4, "INT64": 8, "UINT64": 8, "FP64": 8},
}
_TYPES = {"text_input": "BYTES", "input_ids": "INT32", "stream": "BOOL", "messages": "BYTES"}


def packed(*strings: bytes) -> bytes:
    """Strings as the contents of a BYTES tensor."""
    return b"".join(struct.pack("<I", len(string)) + string for string in strings)


def message(
    tensors: list[tuple[str, str, list[int], bytes]], parameters: dict[str, Any] | None = None
) -> Any:
    """A request with tensors (name, type, shape, contents) and parameters."""
    made = service_pb2.ModelInferRequest(model_name=MODEL)
    for name, kind, shape, contents in tensors:
        made.inputs.add(name=name, datatype=kind, shape=shape)
        made.raw_input_contents.append(contents)
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for name, value in (parameters or {}).items():
        setattr(made.parameters[name], kinds[type(value)], value)
    return made


_PROMPT = ("text_input", "BYTES", [1], packed(MARKED))
_SHAPES = st.lists(st.integers(-9, 2**20), max_size=2)  # see above for what larger ones do


def _wrong_tensor(
    name: str, kind: str, shape: list[int], contents: bytes, change: str
) -> tuple[Any, str]:
    """A request in which one tensor is not what its name stands for."""
    tensor = (name, kind, shape, contents)
    others = [] if name in ("text_input", "input_ids", "messages") else [_PROMPT]
    made = message([*others, tensor], {"max_tokens": 1})
    if change == "twice":
        made = message([*others, tensor, tensor])
    elif change == "no contents":
        del made.raw_input_contents[:]
    elif change == "typed contents":
        made.inputs[-1].contents.fp64_contents.extend([1.0, 2.0])
    elif change == "shared memory":
        made.inputs[-1].parameters["shared_memory_region"].string_param = "/etc/passwd"
        made.inputs[-1].parameters["shared_memory_byte_size"].int64_param = 2**40
    return made, name


_CHANGES = ["", "twice", "no contents", "typed contents", "shared memory"]
_WRONG_TENSORS = st.sampled_from(sorted(_TYPES)).flatmap(
    lambda name: st.builds(
        _wrong_tensor,
        st.just(name),
        st.sampled_from([*_ITEM_SIZES, "BYTES", "", "STRING", "INT4"]),
        _SHAPES,
        st.one_of(st.binary(max_size=64), st.just(packed(MARKED, b"y")), st.just(b"\xff" * 8)),
        st.sampled_from(_CHANGES),
    )
)


def _is_surely_wrong(case: tuple[Any, str]) -> bool:
    """Whether the tensor's type is not what the model declares."""
    return bool(case[0].inputs[-1].datatype != _TYPES[case[1]])


_STRINGS = ["text_input", "messages", "sampling_parameters", "call_id", "task"]


def _tensors_of(fields: dict[str, Any]) -> list[tuple[str, str, list[int], bytes]]:
    """The tensors that hold the fields of a body."""
    tensors = []
    for name, value in fields.items():
        if name == "input_ids":
            tensors.append((name, "INT32", [len(value)], struct.pack(f"<{len(value)}i", *value)))
        elif isinstance(value, bool):
            tensors.append((name, "BOOL", [1], bytes([value])))
        else:
            texts = value if isinstance(value, list) else [value]
            encoded = packed(*(text.encode() for text in texts))
            tensors.append((name, "BYTES", [len(texts)], encoded))
    return tensors


INFERS = st.one_of(
    st.builds(
        lambda field: Infer(message(_tensors_of(_with_sampling(dict([field])))), field[0]),
        _wrong_field,
    ),
    st.builds(
        lambda field: Infer(message([_PROMPT], dict([field])), field[0]),
        _wrong_scalar.filter(lambda field: field[0] not in _TRITON_S_OWN),
    ),
    _WRONG_PROMPTS.map(lambda prompt: Infer(message(_tensors_of(prompt[0])), prompt[1])),
    _WRONG_TENSORS.filter(_is_surely_wrong).map(lambda case: Infer(case[0])),
    _WRONG_TENSORS.map(lambda case: Infer(case[0])),
    st.builds(
        lambda name, text: Infer(
            message([(name, "BYTES", [1], packed(text))])
            if name in ("text_input", "messages")
            else message([_PROMPT, (name, "BYTES", [1], packed(text))]),
            name,
        ),
        st.sampled_from(_STRINGS),
        _BAD_UTF8,
    ),
    st.builds(
        lambda name: Infer(message([_PROMPT, (name, "BYTES", [1], packed(MARKED))]), name),
        st.sampled_from([MARK, "text_output", "__class__", f"../../{MARK}"]),
    ),
    _JUNK_TEXT.map(
        lambda text: Infer(
            message(
                [
                    _PROMPT,
                    ("sampling_parameters", "BYTES", [1], packed(text.encode(errors="replace"))),
                ]
            )
        )
    ),
)

# --- bytes ----------------------------------------------------------------------------------------

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def _frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None) -> bytes:
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


_FRAMES = st.builds(
    _frame,
    st.integers(0, 12),
    st.integers(0, 255),
    st.sampled_from([0, 1, 2, 2**31 - 1, 2**32 - 1]),
    st.binary(max_size=64),
    st.one_of(st.none(), st.integers(0, 2**24 - 1)),
)
_HEAD = b"POST " + PATH.encode() + b"/generate HTTP/1.1\r\nHost: x\r\n"
_LENGTHS = [
    b"-1",
    b"1",
    b"100",
    b"1000000000000000000",
    b"18446744073709551619",
    b"x",
    b"",
    b"0x10",
]
_HEADERS = _one_of(
    [
        *(b"Content-Length: " + length + b"\r\n" for length in _LENGTHS),
        *(
            b"Transfer-Encoding: chunked\r\n",
            b"Transfer-Encoding: \0\r\n",
            b"Expect: 100-continue\r\n",
        ),
        *(
            b"Content-Encoding: gzip\r\n",
            b"Inference-Header-Content-Length: -5\r\n",
            b": \r\n",
            b"\r",
            MARKED + b": " + MARKED + b"\r\n",
        ),
        *(b"X: " + b"a" * 70000 + b"\r\n", b"a: b\r\n" * 500, b"Host: \xff" + MARKED + b"\r\n"),
    ]
)
_CHUNKS = st.sampled_from(
    [b"5\r\nab", b"zz\r\n{}\r\n", b"-1\r\n", b"2\r\n{}\r\n0\r\n\r\n", b"f" * 17]
)

RAW = st.one_of(
    st.builds(Raw, st.sampled_from(["http", "grpc"]), st.binary(max_size=300)),
    st.builds(
        lambda headers, body: Raw("http", _HEAD + b"".join(headers) + b"\r\n" + body),
        st.lists(_HEADERS, max_size=4),
        st.one_of(st.binary(max_size=60), _CHUNKS, st.just(MARKED)),
    ),
    st.builds(
        lambda method, path: Raw("http", method + b" " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n"),
        _one_of([b"GET", b"PUT", b"FOO", b"", b"\0", b"A" * 5000]),
        _one_of([b"/", b"*", b"/../../" + MARKED, b"/" + MARKED * 1500, b"/%00", b"\xff"]),
    ),
    st.builds(
        lambda frames: Raw("grpc", _PREFACE + b"".join(frames)), st.lists(_FRAMES, max_size=6)
    ),
    st.builds(
        lambda size: Raw("grpc", (_PREFACE + _frame(4, 0, 0, b"", None))[:size]),
        st.integers(1, 33),
    ),
)

CASES: SearchStrategy[Case] = st.one_of(POSTS, INFERS, RAW)
