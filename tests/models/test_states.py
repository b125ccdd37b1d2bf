"""Models with layers that keep a state per sequence: cuts, forks, grammars, memory, bad input."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from oracle import VOCAB_SIZE, Oracle, make_engine, run, tokens_of

from paged_backend.checkpoint.mixers import LightningShape
from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.core.state_slots import StateSlots
from paged_backend.engine.engine import Engine
from paged_backend.models.delta import GatedDelta
from paged_backend.models.division import Ranks
from paged_backend.models.states import StateLayer, StatePool
from paged_backend.values.errors import ConfigError
from paged_backend.values.outputs import SequenceOutput
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

PROMPT = [3 + 7 * place % 190 for place in range(77)]
FAMILIES = "qwen3-next", "qwen3.5"
NEW = "granite-hybrid-moe", "kimi-linear", "minimax", "nemotron-h-moe", "zamba2"
ALONE = "mamba", "falcon-mamba", "mamba2"
"""They have no attention."""


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(request.param, tmp_path_factory.mktemp(request.param))


def answer(engine: Engine, params: SamplingParams) -> list[SequenceOutput]:
    """The outputs of one request."""
    engine.add_request(Request("one", PROMPT, params))
    outputs: list[SequenceOutput] = []
    while engine.has_unfinished:
        outputs += engine.step()
        engine.scheduler.check_invariants()
    return outputs


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family",
    [
        *("qwen3-next", "falcon-h1", "jamba", "nemotron-h", *NEW, "mamba", "mamba2"),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("qwen3.5", "falcon-mamba")),
    ],
)
def test_cuts_of_a_prompt_never_change_a_logit(family: str, dtype: str, tmp_path: Path) -> None:
    """Not by a bit, wherever chunks and checkpoints are."""
    make_checkpoint(family, tmp_path)
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, return_generation_logits=True
    )
    found: set[tuple[bytes, ...]] = set()
    for budget, mode, size in ((128, "none", 512), (7, "none", 512), (19, "align", 32)):
        engine = make_engine(
            tmp_path,
            dtype=dtype,
            enforce_eager=budget == 7,
            max_num_batched_tokens=budget,
            max_num_seqs=4,
            mamba_cache_mode=mode,
            mamba_block_size=size,
        )
        for _ in range(2):  # with prefix hits, the second time
            outputs = answer(engine, params)
            found.add(tuple(e.logits for output in outputs for e in output.logprobs or ()))
    assert len(found) == 1
    assert len(found.pop()) == 12


def test_completions_of_a_prompt_share_its_state(oracle: Oracle) -> None:
    """Each of them is what it would be alone."""
    engine = make_engine(oracle.folder)
    together = answer(engine, SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=16))
    by_index: dict[int, list[int]] = {}
    for output in together:
        by_index.setdefault(output.index, []).extend(output.new_token_ids)
    assert len({tuple(tokens) for tokens in by_index.values()}) == 3
    engine = make_engine(oracle.folder, max_num_batched_tokens=9, enforce_eager=True)
    again = answer(engine, SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=16))
    for output in again:
        first = by_index[output.index][: len(output.new_token_ids)]
        assert output.new_token_ids == first
        del by_index[output.index][: len(first)]
    assert not any(by_index.values())
    states = engine.scheduler.kv.states
    assert states is not None and states.pool.num_used == 0


def test_beams_equal_those_of_transformers(oracle: Oracle) -> None:
    params = SamplingParams(beam_width=3, n=3, max_tokens=8, temperature=0)
    outputs = answer(make_engine(oracle.folder), params)
    ids = torch.tensor([PROMPT])
    wanted = oracle.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
    )
    for index, row in enumerate(wanted[:, len(PROMPT) :].tolist()):
        tokens = [t for out in outputs if out.index == index for t in out.new_token_ids]
        assert tokens == row[: len(tokens)] and len(tokens) > 0
        assert set(row[len(tokens) :]) <= {0}


def test_a_second_turn_starts_after_the_states_of_the_first(oracle: Oracle) -> None:
    engine = make_engine(oracle.folder, max_model_len=512, mamba_block_size=32)
    first = [3 + 11 * place % 190 for place in range(300)]
    (tokens,) = tokens_of(run(engine, [(first, 40)]))
    work = [([*first, *tokens, 7, 8], 6), (first[:200] + [5] * 30, 6)]
    outputs = run(engine, work)
    oracle.confirm(work, tokens_of(outputs))
    cached = [outputs[str(place)][0].num_cached_tokens for place in range(2)]
    assert cached[0] >= 288 and cached[1] == 192


@pytest.mark.sampled
@pytest.mark.parametrize("mutant", ["slot", "norm", "decay", "checkpoint"])
def test_a_wrong_state_changes_tokens(
    oracle: Oracle, mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: the comparison with transformers notices each of them."""
    if mutant == "slot":  # every second step reads the state of nothing
        advance = StateSlots.advance
        monkeypatch.setattr(
            StateSlots, "advance", lambda *args, **more: (0, advance(*args, **more)[1])
        )
    elif mutant == "checkpoint":  # a prefix hit reads a slot that was overwritten meanwhile
        find = StatePool.of
        reads: list[bool] = []

        def stale(self: StatePool, layer: StateLayer) -> Sequence[torch.Tensor]:
            tensors = find(self, layer)
            if reads:
                for tensor in tensors:
                    tensor.zero_()
            return tensors

        monkeypatch.setattr(StatePool, "of", stale)
        take = StateSlots.take_checkpoint
        monkeypatch.setattr(
            StateSlots, "take_checkpoint", lambda *args: (reads.append(True), take(*args))
        )
    else:
        pack = GatedDelta.pack

        def damaged(self: GatedDelta) -> None:
            pack(self)
            weight = self._norm if mutant == "norm" else self._decay
            weight.fill_(1.0 if mutant == "norm" else -1.0)

        monkeypatch.setattr(GatedDelta, "pack", damaged)
    engine = make_engine(
        oracle.folder, mamba_block_size=16, max_num_batched_tokens=32, enforce_eager=True
    )
    work = [(PROMPT, 12), ([*PROMPT[:60], 4, 5], 12)]
    for part in ([work[0]], work):
        engine_answers = []
        for prompt, max_tokens in part:
            engine.add_request(
                Request("one", prompt, SamplingParams(temperature=0, max_tokens=max_tokens))
            )
            tokens: list[int] = []
            while engine.has_unfinished:
                for output in engine.step():
                    tokens += output.new_token_ids
            engine_answers.append(tokens)
    with pytest.raises(AssertionError):
        oracle.confirm(work, engine_answers)


@pytest.mark.parametrize("family", [*NEW, *ALONE])
def test_the_state_of_another_time_changes_tokens(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A negative control: prompts in chunks begin each chunk with a state of zeros."""
    oracle, work = Oracle(family, tmp_path), [(PROMPT, 12)]
    options = {"max_num_batched_tokens": 32, "enforce_eager": True}
    oracle.confirm(work, tokens_of(run(make_engine(oracle.folder, **options), work)))
    advance = StateSlots.advance
    monkeypatch.setattr(StateSlots, "advance", lambda *args, **more: (0, advance(*args, **more)[1]))
    with pytest.raises(AssertionError):
        oracle.confirm(work, tokens_of(run(make_engine(oracle.folder, **options), work)))


@pytest.mark.parametrize("family", ALONE)
def test_completions_without_attention_share_a_state(family: str, tmp_path: Path) -> None:
    """Each is what it is alone, and a prompt is found again by the blocks that have no bytes."""
    engine = make_engine(Oracle(family, tmp_path).folder, mamba_block_size=16)
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=12)
    first, again = (answer(engine, params) for _ in range(2))
    tokens = [tokens_by_index(outputs) for outputs in (first, again)]
    assert tokens[0] == tokens[1] and len(set(map(tuple, tokens[0].values()))) == 3
    assert (first[0].num_cached_tokens, again[0].num_cached_tokens) == (0, 64)
    slots = engine.executor.info.kv_layout.states
    stats = engine.stats()
    assert slots is not None and stats.num_state_slots == slots.num_slots - 1
    assert (stats.num_used_blocks, stats.num_used_state_slots, stats.kv_bytes_per_token) == (
        0,
        0,
        0,
    )
    engine.add_request(Request("two", PROMPT, params))
    engine.step()
    assert engine.stats().num_used_state_slots >= 1
    alone = make_engine(tmp_path, max_num_batched_tokens=9, enforce_eager=True, max_num_seqs=3)
    assert tokens_by_index(answer(alone, params)) == tokens[0]


def tokens_by_index(outputs: Sequence[SequenceOutput]) -> dict[int, list[int]]:
    """The tokens of each completion."""
    found: dict[int, list[int]] = {}
    for output in outputs:
        found.setdefault(output.index, []).extend(output.new_token_ids)
    return found


def test_states_have_all_memory_without_attention(tmp_path: Path) -> None:
    folder = Oracle("mamba2", tmp_path).folder
    # Three layers: 3 earlier inputs of 128 + 2 * 2 * 24 channels, and 8 heads of 16 x 24.
    per_slot = 3 * 4 * (3 * (128 + 96) + 8 * 16 * 24)
    info = make_engine(folder, max_num_seqs=4).executor.info
    states = info.kv_layout.states
    assert states is not None and states.num_slots == 16 * 2**20 // per_slot
    assert info.num_blocks == 1 + states.num_slots * 512 // 16
    assert "slots for states" in info.describe() and info.kv_cache == ""
    least = make_engine(folder, kv_cache_memory_bytes=3 * per_slot)
    assert len(tokens_of(run(least, [(PROMPT, 6), (PROMPT[:9], 6)]))) == 2
    with pytest.raises(ConfigError, match=rf"one sequence needs 3; give {3 * per_slot} bytes"):
        make_engine(folder, kv_cache_memory_bytes=3 * per_slot - 1)


def test_a_model_without_a_limit_of_positions(tmp_path: Path) -> None:
    """Its blocks have a limit, unless the longest sequence needs more."""
    folder = Oracle("mamba2", tmp_path).folder
    path = folder / "config.json"
    values = json.loads(path.read_text())
    del values["max_position_embeddings"]
    path.write_text(json.dumps(values))
    info = make_engine(folder).executor.info
    assert (info.max_model_len, info.num_blocks) == (2**20, 1 + 2**17)
    with pytest.raises(ConfigError, match="kv_cache_dtype can only be auto for a model without"):
        make_engine(folder, kv_cache_dtype="fp8")


def test_slopes_are_those_of_transformers(tmp_path: Path) -> None:
    """In each layer, as MiniMax's decays differ."""
    model = make_checkpoint("minimax", tmp_path)
    config = load_model_config(tmp_path)
    for layer in (0, 2):
        shape = config.variant.state_mixer_of(layer)
        assert isinstance(shape, LightningShape)
        wanted = model.model.layers[layer].self_attn.slope_rate.flatten()
        torch.testing.assert_close(torch.tensor(shape.slopes(layer)), wanted, rtol=1e-5, atol=0)
    assert shape.slopes(0) != shape.slopes(2)


@pytest.mark.parametrize(("family", "has_slots"), [("llama3", False), ("lfm2", True)])
def test_ranks_agree_on_slots_only_if_there_are_states(
    family: str, has_slots: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(family, tmp_path)
    rooms: list[torch.Tensor] = []

    def gather(self: Ranks, x: torch.Tensor) -> torch.Tensor:
        rooms.append(x)
        return gathered(self, x)

    gathered = Ranks.gather
    monkeypatch.setattr(Ranks, "gather", gather)
    info = make_engine(tmp_path).executor.info
    assert (info.kv_layout.states is not None) == has_slots
    assert len(rooms) == 1 + has_slots  # the room for blocks, and for slots


def test_bytes_of_a_state_follow_from_the_sizes(tmp_path: Path) -> None:
    oracle = Oracle("qwen3-next", tmp_path)
    info = make_engine(oracle.folder, max_num_seqs=2).executor.info
    # Two layers: 3 earlier inputs of 2 * 32 + 96 channels, and 4 heads of 16 x 24, in float32.
    per_slot = 2 * 4 * (3 * (2 * 32 + 96) + 4 * 16 * 24)
    assert info.kv_layout.states is not None
    assert info.kv_layout.states.num_slots == 1 + 2 * 2 + 512
    left = 16 * 2**20 - info.kv_layout.states.num_slots * per_slot
    assert info.num_blocks == left // (16 * info.kv_bytes_per_token)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mamba_block_size": 24}, "mamba_block_size must be a multiple of block_size"),
        ({"mamba_cache_mode": "some"}, "mamba_cache_mode must be one of none, align, all"),
        ({"kv_cache_memory_bytes": 80_000}, "one sequence needs 3; give"),
        ({"device": "cpu", "kv_cache_dtype": "nothing"}, "kv_cache_dtype must be one of"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: dict[str, object], message: str) -> None:
    folder = Oracle("qwen3.5", tmp_path).folder
    with pytest.raises(ConfigError, match=message):
        make_engine(folder, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["mamba"] * 3}, "layer_types holds .*mamba.*; known: full_attention, "),
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of 3 strings"),
        ({"linear_num_value_heads": 3}, "must be a multiple of linear_num_key_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be an integer from 2"),
        ({"linear_key_head_dim": 20}, "linear_attn"),
    ],
)
def test_configurations_that_do_not_fit(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    folder = Oracle("qwen3.5", tmp_path).folder
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        make_engine(folder)


def test_dummy_weights_and_quantized_layers(tmp_path: Path) -> None:
    """They are right enough to run: other tests compare tokens."""
    folder = Oracle("qwen3.5", tmp_path).folder
    for options in ({"load_format": "dummy"}, {"quantization": "int8"}):
        (tokens,) = tokens_of(run(make_engine(folder, **options), [(PROMPT, 9)]))
        assert 0 < len(tokens) <= 9 and max(tokens) < VOCAB_SIZE
