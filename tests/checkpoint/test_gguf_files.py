"""Damaged and hostile GGUF files: one line that names the file, before memory is taken."""

from __future__ import annotations

import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from effort import examples
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType
from gguf_vocabulary import add_vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import make_engine

from paged_backend.checkpoint.gguf.header import MAX_HEADER_BYTES, read_header
from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.checkpoint.weights import load_weights
from paged_backend.models.loader import build_model
from paged_backend.platforms.cpu.torch_platform import TorchPlatform
from paged_backend.text.tokenizer import load_tokenizer
from paged_backend.values.errors import ConfigError

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("quantization", "text")]

from gguf_files import GgufModel  # noqa: E402
from sample_tokenizers import byte_level_bpe  # noqa: E402

UINT32, STRING, ARRAY = 4, 8, 9
F32, Q8_0 = 0, 8
HUGE = 2**60


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str | bytes, dims: tuple[int, ...], kind: int = F32, offset: int = 0) -> bytes:
    places = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return text(name) + places


def header(
    *entries: bytes,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensors: int = 0,
    keys: int = 0,
    order: str = "<",
) -> bytes:
    start = magic + struct.pack(f"{order}IQQ", version, tensors, keys)
    return start + b"".join(entries) + bytes(256)


def aligned(value: int) -> bytes:
    return key("general.alignment", UINT32, struct.pack("<I", value))


FLAG = key("k", 7, b"\1")
HEADERS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a GGUF file"),
    "short": (b"GG", "is not a GGUF file"),
    "magic": (header(magic=b"GGML"), "is not a GGUF file"),
    "cut": (b"GGUF\3\0\0\0\1", "the number of tensors ends beyond the file"),
    "version 1": (header(version=1), "has version 1 of GGUF; versions 2 and 3 are supported"),
    "version 0": (header(version=0), "has version 0"),
    "big-endian": (header(order=">"), "is in big-endian byte order"),
    "tensors": (header(tensors=HUGE), f"has {HUGE} tensors, at most 65536"),
    "keys": (header(keys=HUGE), f"has {HUGE} keys, at most 65536"),
    "keys cut": (
        header(FLAG, keys=9)[:-256],
        "key ends beyond the file, which is truncated or damaged",
    ),
    "name": (header(text("k", HUGE), keys=1), "key ends beyond the file"),
    "name bytes": (header(key(b"k\xff", 7, b"\1"), keys=1), "key is not UTF-8: b'k\\xff'"),
    "string": (header(key("k", STRING, text("", HUGE)), keys=1), "key k ends beyond the file"),
    "array": (
        header(key("k", ARRAY, struct.pack("<IQ", UINT32, HUGE)), keys=1),
        f"key k has {HUGE} entries, which ends beyond the file",
    ),
    "strings": (
        header(key("k", ARRAY, struct.pack("<IQ", STRING, HUGE)), keys=1),
        f"key k has {HUGE} entries, which ends beyond the file",
    ),
    "nested": (
        header(key("k", ARRAY, struct.pack("<IQ", ARRAY, 1)), keys=1),
        "key k has a value of type 9, which is not supported",
    ),
    "value": (header(key("k", 99, b""), keys=1), "key k has a value of type 99"),
    "key twice": (header(FLAG, FLAG, keys=2), "key k is there twice"),
    "alignment 0": (header(aligned(0), keys=1), "general.alignment must be an integer from 1"),
    "alignment 3": (header(aligned(3), keys=1), "general.alignment must be a power of two, got 3"),
    "alignment text": (
        header(key("general.alignment", STRING, text("x")), keys=1),
        "general.alignment must be an integer",
    ),
    "parts": (
        header(key("split.count", 2, b"\3\0"), keys=1),
        "split.count is not supported unless it is 1; merge the parts first",
    ),
    "tensor bytes": (header(tensor(b"t\xff", (1,)), tensors=1), "name of a tensor is not UTF-8"),
    "dimensions 0": (header(tensor("t", ()), tensors=1), "tensor t has 0 dimensions"),
    "dimensions": (
        header(text("t") + struct.pack("<I", 2**31), tensors=1),
        "tensor t has 2147483648 dimensions, not 1 to 4",
    ),
    "no columns": (header(tensor("t", (0, 3)), tensors=1), "tensor t has shape [3, 0]"),
    "overflow": (header(tensor("t", (2**62, 4)), tensors=1), "tensor t ends beyond the file"),
    "blocks": (header(tensor("t", (33,), Q8_0), tensors=1), "blocks of 32"),
    "type": (header(tensor("t", (1,), 12345), tensors=1), "the type number 12345"),
    "integers": (header(tensor("t", (1,), Kind.I32), tensors=1), "tensor t has the type I32"),
    "unaligned": (header(tensor("t", (1,), offset=4), tensors=1), "tensor t is at 4, which 32"),
    "offset": (header(tensor("t", (1,), offset=2**63), tensors=1), "tensor t ends beyond the file"),
    "data cut": (header(tensor("t", (65,)), tensors=1), "tensor t ends beyond the file"),
    "overlap": (
        header(tensor("t", (9,)), tensor("u", (1,), offset=32), tensors=2),
        "tensor u overlaps t",
    ),
    "tensor twice": (
        header(tensor("t", (1,)), tensor("t", (1,), offset=32), tensors=2),
        "tensor t is there twice",
    ),
    "control": (header(tensor("a\nb\33[2J", (0,)), tensors=1), "tensor a\\nb\\x1b[2J has shape"),
}


def refused(path: Path, read: Callable[[Path], Any] = load_model_config) -> str:
    """The message that a file is refused with, and for which little memory was taken."""
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError) as caught:
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.isprintable() and message.startswith(str(path))
    return message


@pytest.mark.parametrize("name", HEADERS)
def test_headers(name: str, tmp_path: Path) -> None:
    data, problem = HEADERS[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    message = refused(path)
    assert problem in message


def test_a_header_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    length = MAX_HEADER_BYTES
    path.write_bytes(header(key("k", STRING, text("", length)), keys=1))
    with path.open("r+b") as stream:
        stream.truncate(2 * length)  # a hole, which takes no room on the disk
    assert f"key k ends beyond the {length} bytes of a header" in refused(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read .*: No such file"):
        read_header(tmp_path / "m.gguf")


# Files whose header is sound, of a model with another one's keys or tensors


def tiny(path: Path, family: str = "llama3", head_dim: int = 4) -> GgufModel:
    """A file being written, with a vocabulary of bytes."""
    tokenizer = byte_level_bpe()
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "hidden_size": 32, "intermediate_size": 32}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": head_dim}
    overrides = {**sizes, **heads, "num_hidden_layers": 2}
    model = make_checkpoint(family, path.parent / "float", **overrides)
    file = GgufModel(path, model).config()
    add_vocabulary(file.writer, tokenizer, "llama-bpe")
    file.writer.add_eos_token_id(2)
    return file.tensors(Kind.Q8_0)


def with_key(name: str, value: object) -> Callable[[GgufModel], None]:
    def change(file: GgufModel) -> None:
        file.writer.kv_data[0].pop(name, None)
        if isinstance(value, list):
            file.writer.add_array(name, value)
        elif value is not None:
            kind = GGUFValueType.INT64 if type(value) is int else GGUFValueType.get_type(value)
            file.writer.add_key_value(name, value, kind)

    return change


def with_tensor(name: str, **values: Any) -> Callable[[GgufModel], None]:
    def change(file: GgufModel) -> None:
        (tensors,) = file.writer.tensors
        info = tensors.pop(name, None)
        if values:
            for field, value in values.items():
                setattr(info, field, value)
            tensors[name] = info

    return change


NAN = torch.full((32,), float("nan")).numpy()
MODELS: list[tuple[Callable[[GgufModel], None], str]] = [
    (with_key("general.architecture", "mamba"), "general.architecture must be one of llama, qwen2"),
    (with_key("general.architecture", "qwen2"), "qwen2: block_count is missing"),
    (with_key("llama.block_count", None), "llama: block_count is missing"),
    (with_key("llama.block_count", 3), "llama: block_count is 3, but blk.2.attn_norm.weight is"),
    (with_key("llama.block_count", HUGE), "is missing"),
    (with_key("llama.block_count", 1), "has no place in this architecture"),
    (with_key("llama.block_count", "2"), "llama: block_count must be an integer from 1, got '2'"),
    (with_key("llama.context_length", HUGE), "max_position_embeddings must be an integer from 1"),
    (with_key("llama.embedding_length", HUGE), f"the metadata ask for [422, {HUGE}]"),
    (with_key("llama.embedding_length", -1), "llama: embedding_length must be an integer from 1"),
    (
        with_key("llama.feed_forward_length", HUGE),
        "ffn_gate.weight has shape [32, 32]",
    ),
    (with_key("llama.attention.head_count", HUGE), "head_dim"),
    (with_key("llama.attention.head_count", [8, 8]), "head_count must be an integer"),
    (with_key("llama.attention.head_count_kv", 3), "num_key_value_heads (3) must divide"),
    (with_key("llama.attention.key_length", 8), "attention.value_length must be the 8 of a head"),
    (with_key("llama.rope.dimension_count", 2), "rope.dimension_count must be the 4 of a head"),
    (
        with_key("llama.rope.freq_base", float("nan")),
        "must be a number above 0, got nan",
    ),
    (with_key("llama.rope.scaling.type", "longrope"), "rope.scaling.type must be one of none, lin"),
    (
        with_key("llama.rope.scaling.type", "yarn"),
        "must be none beside rope_freqs",
    ),
    (with_key("llama.attention.layer_norm_rms_epsilon", None), "layer_norm_rms_epsilon is missing"),
    (with_key("llama.expert_count", 8), "llama: expert_count is 8, which is not supported"),
    (with_key("llama.attention.sliding_window", "x"), "sliding_window must be an integer"),
    (with_key("tokenizer.ggml.tokens", ["a", "b", "c"]), "token_type has 422 entries for 3 tokens"),
    (with_key("tokenizer.ggml.eos_token_id", 422), "eos_token_id is 422, but there are 422 tokens"),
    (with_tensor("blk.1.ffn_up.weight"), "tensor blk.1.ffn_up.weight is missing"),
    (with_tensor("token_embd.weight"), "tensor token_embd.weight is missing"),
    (with_tensor("output_norm.weight", shape=(31,)), "tensor output_norm.weight has shape [31]"),
    (with_tensor("rope_freqs.weight", tensor=-NAN[:2]), "rope_freqs.weight (F32) must hold finite"),
    (
        with_tensor("rope_freqs.weight", shape=(1,)),
        "must be a list of 2 numbers above zero",
    ),
]


@pytest.mark.parametrize(("change", "problem"), MODELS, ids=[problem for _, problem in MODELS])
def test_models(change: Callable[[GgufModel], None], problem: str, tmp_path: Path) -> None:
    file = tiny(tmp_path / "m.gguf")
    change(file)
    assert problem in refused(file.close())


@pytest.mark.parametrize(
    ("number", "pooling"),
    [(None, None), (0, None), (1, ("mean", True)), (2, ("cls", True)), (3, ("last", True))],
)
def test_a_file_says_how_it_is_pooled(
    number: int | None, pooling: tuple[str, bool] | None, tmp_path: Path
) -> None:
    file = tiny(tmp_path / "m.gguf", head_dim=16)
    with_key("llama.pooling_type", number)(file)
    file.close()
    found = make_engine(tmp_path / "m.gguf").executor.info.pooling
    assert found == pooling


def test_pooling_of_a_reranker_is_refused(tmp_path: Path) -> None:
    file = tiny(tmp_path / "m.gguf")
    with_key("llama.pooling_type", 4)(file)
    file.close()
    with pytest.raises(ConfigError, match="pooling_type must be one of 0, 1, 2, 3; got 4"):
        make_engine(tmp_path / "m.gguf")


def test_a_window_of_another_family_is_refused(tmp_path: Path) -> None:
    file = tiny(tmp_path / "m.gguf", "qwen3")
    file.writer.add_sliding_window(16)
    assert "attention.sliding_window is not supported for qwen3" in refused(file.close())


def load(path: Path) -> None:
    """All that is read of a file."""
    model = build_model(load_model_config(path), 16, TorchPlatform(torch.float32))
    load_weights(path, model.parameters())
    model.pack()


@pytest.mark.parametrize("bits", [0x7C00, 0x7E00, 0xFC00], ids=["inf", "nan", "-inf"])
def test_scales_that_are_not_finite(bits: int, tmp_path: Path) -> None:
    file = tiny(tmp_path / "m.gguf")
    file.writer.tensors[0]["blk.1.attn_v.weight"].tensor[3, :2] = list(struct.pack("<H", bits))
    path = file.close()
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert (
        str(caught.value) == f"{path}: tensor blk.1.attn_v.weight (Q8_0) must hold finite numbers"
    )


def test_all_tokens_that_end_an_answer(tmp_path: Path) -> None:
    file = tiny(tmp_path / "m.gguf")
    tokens = file.writer.kv_data[0]["tokenizer.ggml.tokens"].value
    tokens[1], tokens[7] = "<|im_end|>", "<|endoftext|>"  # only the first one is a special token
    file.writer.add_eot_token_id(9)
    assert load_model_config(file.close()).eos_token_ids == (1, 2, 9)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("sound") / "m.gguf").close()


def test_every_truncation_is_refused(sound: Path, tmp_path: Path) -> None:
    load(sound)
    load_tokenizer(sound)
    data, path = sound.read_bytes(), tmp_path / "m.gguf"
    for length in (*range(0, 400, 7), *range(400, len(data) - 32, 997)):
        path.write_bytes(data[:length])
        assert "ends beyond" in refused(path) or length < 4


@settings(max_examples=examples(150))
@given(st.data())
def test_flipped_bytes_are_refused_or_load(sound: Path, tmp_path_factory: Any, data: Any) -> None:
    content = bytearray(sound.read_bytes())
    end = min(tensor.offset for tensor in read_header(sound).tensors.values())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, end - 1))
        content[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("flipped") / "m.gguf"
    path.write_bytes(content)
    for read in (load, load_tokenizer):
        try:
            read(path)
        except ConfigError as error:
            assert str(path) in str(error) and "\n" not in str(error)
