"""Workloads: lengths, what prompts share, that a seed gives the same again, and bad input."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_backend import LLM, SamplingParams
from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.tools.demo import load_questions
from paged_backend.tools.workloads import TokenizerContext, WorkloadOptions, make_requests
from paged_backend.tools.workloads.lengths import parse_lengths
from paged_backend.values.errors import ConfigError

DATA = Path(__file__).parent.parent.parent / "loadtest" / "workloads"
SHAREGPT, TRACE = str(DATA / "demo_sharegpt.json"), str(DATA / "sample_trace.jsonl")
DEMO = TokenizerContext(vocab_size=2048, max_model_len=2048, tokenizer="demo")
IDS = replace(DEMO, tokenizer=None)
WIDE = replace(IDS, max_model_len=2**24)
RECIPES = ("random", "shared-prefix", "conversations")

lengths = st.integers(1, 4000)
seeds = st.integers(0, 2**63 - 1)
slow = settings(deadline=None, max_examples=examples(25))  # each example loads the tokenizer


@cache
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL_DIR)


def count_text(text):
    return len(tokenizer().encode(text))


def render(messages):
    return tokenizer().apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True
    )


def count_chat(messages):
    return len(tokenizer().encode(render(messages), add_special_tokens=False))


def greedy(request):
    return SamplingParams(temperature=0, max_tokens=request.max_tokens)


def options(name="random", **values):
    path = {"sharegpt": SHAREGPT, "trace": TRACE}.get(name)
    return WorkloadOptions(**({"dataset_name": name, "dataset_path": path} | values))


def draw(text, count=4000, seed=0):
    return parse_lengths("input_len", text).draw(np.random.default_rng(seed), count)


class TestLengths:
    @given(lengths, lengths, seeds)
    def test_uniform_lengths_fill_their_range(self, a, b, seed):
        low, high = min(a, b), max(a, b)
        drawn = draw(f"uniform:min={low},max={high}", 100, seed)
        assert low <= drawn.min() and drawn.max() <= high

    def test_uniform_lengths_are_all_alike(self):
        counts = Counter(draw("uniform:min=3,max=6", 40_000).tolist())
        assert counts.keys() == {3, 4, 5, 6}
        assert all(abs(count - 10_000) < 500 for count in counts.values())

    def test_log_normal_lengths_have_their_median_sigma_and_ends(self):
        drawn = draw("lognormal:median=128,min=32,max=512")
        assert np.median(drawn) == pytest.approx(128, rel=0.05)
        # One sigma about the median, 0.7 of the logarithm: 16% to 84%.
        assert np.percentile(drawn, 15.87) == pytest.approx(128 / np.exp(0.7), rel=0.05)
        assert np.percentile(drawn, 84.13) == pytest.approx(128 * np.exp(0.7), rel=0.05)
        assert (drawn.min(), drawn.max()) == (32, 512)
        narrow = draw("lognormal:median=128,min=1,max=9999,sigma=0.1")
        assert np.percentile(narrow, 84.13) == pytest.approx(128 * np.exp(0.1), rel=0.05)

    def test_percentiles_are_met(self):
        points = {0: 10, 50: 100, 90: 1000, 100: 4000}
        text = "percentiles:" + ",".join(f"{percent}={at}" for percent, at in points.items())
        drawn = draw(text, 40_000)
        for percent, at in points.items():
            assert np.percentile(drawn, percent) == pytest.approx(at, rel=0.05)
        assert np.percentile(drawn, 70) == pytest.approx(550, rel=0.05)

    def test_no_length_lies_beyond_the_percentiles_that_are_given(self):
        assert set(draw("percentiles:50=7").tolist()) == {7}
        drawn = draw("percentiles:25=7,75=9")
        assert np.mean(drawn == 7) == pytest.approx(0.25 + 0.125, abs=0.03)
        assert set(drawn.tolist()) == {7, 8, 9}

    def test_a_number_is_that_length(self):
        assert set(draw("17").tolist()) == {17}

    @pytest.mark.parametrize(
        "text",
        [
            *("", "0", "-3", "1.5", "many", "99999999", "uniform", "uniform:", "uniform:5"),
            *("uniform:min=4,max=2", "uniform:min=0,max=2", "uniform:min=1", "uniform:max=3"),
            *("uniform:min=1,max=3,sigma=1", "uniform:min=1,min=2,max=3", "normal:min=1,max=3"),
            *("lognormal:median=9,min=10,max=20", "lognormal:median=9,min=1,max=8"),
            *("lognormal:median=9", "lognormal:median=9,min=1,max=20,sigma=0"),
            *("lognormal:median=9,min=1,max=20,sigma=nan", "percentiles:", "percentiles:50"),
            *("percentiles:50=9,40=10", "percentiles:50=9,90=8", "percentiles:101=9"),
            *("percentiles:-1=9", "percentiles:nan=9", "percentiles:50=9,50=10"),
        ],
    )
    @pytest.mark.parametrize("name", ["input_len", "output_len", "num_turns"])
    def test_anything_else_is_refused_with_the_forms(self, name, text):
        with pytest.raises(ConfigError, match=f"^option {name} must be a number, uniform:min=A"):
            WorkloadOptions(**{name: text})

    @given(st.text())
    def test_no_text_breaks_the_reader(self, text):
        try:
            parsed = parse_lengths("input_len", text)
        except ConfigError as error:
            assert "\n" not in str(error)
        else:
            assert parsed.draw(np.random.default_rng(0), 3).min() >= 1


class TestRandom:
    def test_the_default_is_a_log_normal_mix(self):
        requests = make_requests(options(num_prompts=2000), WIDE)
        given = [len(request.prompt) for request in requests]
        wanted = [request.max_tokens for request in requests]
        assert (min(given), max(given), min(wanted), max(wanted)) == (32, 512, 16, 256)
        assert np.median(given) == pytest.approx(128, rel=0.08)
        assert np.median(wanted) == pytest.approx(96, rel=0.08)
        assert len(make_requests(options(), IDS)) == 64

    def test_results_show_the_defaults_that_depend_on_the_dataset(self):
        assert options().input_len == "lognormal:median=128,min=32,max=512"
        assert options("conversations").output_len == "lognormal:median=24,min=4,max=64"
        assert options("trace").output_len is options("sharegpt").output_len is None

    @slow
    @given(seeds, st.sampled_from(["ids", "text", "chat"]))
    def test_prompts_have_their_length_to_the_token(self, seed, prompt_format):
        count = {"ids": len, "text": count_text, "chat": count_chat}[prompt_format]
        recipe = options(
            num_prompts=5,
            seed=seed,
            prompt_format=prompt_format,
            input_len="uniform:min=6,max=300",
            output_len="uniform:min=1,max=40",
        )
        made = make_requests(recipe, DEMO)
        as_ids = make_requests(replace(recipe, prompt_format="ids"), IDS)
        assert [count(request.prompt) for request in made] == [len(r.prompt) for r in as_ids]
        assert [r.max_tokens for r in made] == [r.max_tokens for r in as_ids]

    @slow
    @given(seeds, st.sampled_from(RECIPES), st.integers(1, 9))
    def test_a_seed_gives_the_same_again_and_another_gives_another(self, seed, name, count):
        recipe = options(name, seed=seed, num_prompts=count)
        assert make_requests(recipe, DEMO) == make_requests(recipe, DEMO)
        assert make_requests(recipe, DEMO) != make_requests(replace(recipe, seed=seed ^ 1), DEMO)

    def test_prompts_share_nothing_and_hold_all_kinds_of_ids(self):
        requests = make_requests(options(num_prompts=500), IDS)
        assert len({request.prompt[:4] for request in requests}) == 500
        seen = {token for request in requests for token in request.prompt}
        assert seen == set(range(2048))
        assert all(type(token) is int for token in requests[0].prompt)

    def test_the_end_of_the_sequence_may_count(self):
        assert all(request.ignore_eos for request in make_requests(options(), IDS))
        heeding = make_requests(options(ignore_eos=False), IDS)
        assert not any(request.ignore_eos for request in heeding)

    def test_what_does_not_fit_is_named(self):
        tight = TokenizerContext(vocab_size=10, max_model_len=20)
        fits = options(input_len="15", output_len="5")
        assert len(make_requests(fits, tight)) == 64
        problem = "^request 1 does not fit: prompt and answer have 21 tokens, max_model_len is 20"
        with pytest.raises(ConfigError, match=problem):
            make_requests(replace(fits, output_len="6"), tight)

    def test_what_does_not_fit_can_be_left_out(self):
        tight = TokenizerContext(vocab_size=10, max_model_len=20)
        recipe = options(
            input_len="uniform:min=10,max=29", output_len="1", num_prompts=400, skip_too_long=True
        )
        kept = make_requests(recipe, tight)
        assert {len(request.prompt) for request in kept} == set(range(10, 20))
        with pytest.raises(ConfigError, match=r"random dataset .* fits max_model_len \(20\)"):
            make_requests(replace(recipe, input_len="25"), tight)

    def test_a_prompt_is_longer_than_its_template(self):
        with pytest.raises(ConfigError, match="^option input_len must be above 3, .* has 3$"):
            make_requests(options(prompt_format="chat", input_len="3"), DEMO)
        (request,) = make_requests(
            options(prompt_format="chat", input_len="4", num_prompts=1), DEMO
        )
        assert count_chat(request.prompt) == 4


class TestSharedPrefix:
    @given(seeds, st.integers(0, 60), st.integers(1, 7), st.integers(1, 30))
    def test_groups_share_their_prefix_and_nothing_more(self, seed, prefix_len, groups, count):
        recipe = options(
            "shared-prefix",
            seed=seed,
            num_prompts=count,
            prefix_len=prefix_len,
            num_prefixes=groups,
            input_len="uniform:min=20,max=40",
        )
        requests = make_requests(recipe, WIDE)
        assert all(prefix_len + 20 <= len(r.prompt) <= prefix_len + 40 for r in requests)
        assert len({r.prompt[prefix_len:] for r in requests}) == count
        sizes = Counter(request.prompt[:prefix_len] for request in requests)
        expected = min(groups, count) if prefix_len > 2 else len(sizes)
        assert len(sizes) == expected
        if prefix_len > 2:
            assert max(sizes.values()) - min(sizes.values()) <= 1

    def test_the_order_of_the_groups_is_no_pattern(self):
        requests = make_requests(options("shared-prefix", num_prefixes=4, prefix_len=16), IDS)
        names = {prompt: n for n, prompt in enumerate({r.prompt[:16] for r in requests})}
        order = [names[request.prompt[:16]] for request in requests]
        assert order != sorted(order)
        assert order[:4] * 16 != order

    @pytest.mark.parametrize("prompt_format", ["text", "chat"])
    def test_texts_share_as_many_tokens(self, prompt_format):
        recipe = options(
            "shared-prefix", num_prompts=2, num_prefixes=1, prefix_len=50, input_len="20"
        )
        first, second = make_requests(replace(recipe, prompt_format=prompt_format), DEMO)
        if prompt_format == "chat":
            assert count_chat(first.prompt) == count_chat(second.prompt) == 70
            first, second = first.prompt[0]["content"], second.prompt[0]["content"]
        else:
            assert count_text(first.prompt) == count_text(second.prompt) == 70
            first, second = first.prompt, second.prompt
        pairs = zip(tokenizer().encode(first), tokenizer().encode(second), strict=True)
        shared = next(n for n, (one, other) in enumerate(pairs) if one != other)
        assert 50 <= shared <= 52


class TestConversations:
    def test_turns_lengths_and_history(self):
        recipe = options(
            "conversations",
            num_prompts=20,
            num_turns="uniform:min=1,max=5",
            input_len="uniform:min=5,max=9",
            output_len="uniform:min=2,max=4",
        )
        requests = make_requests(recipe, DEMO)
        assert {len(request.later) for request in requests} == {0, 1, 2, 3, 4}
        for request in requests:
            (message,) = request.prompt
            assert 5 <= count_text(message["content"]) <= 9
            assert all(5 <= count_text(turn.content) <= 9 for turn in request.later)
            assert all(2 <= turn.max_tokens <= 4 for turn in request.later)
            assert request.arrival_s is None
        longest = max(requests, key=lambda request: len(request.later))
        last, turns = longest, 1
        while (after := last.follow_up("an answer")) is not None:
            last, turns = after, turns + 1
        assert [message["role"] for message in last.prompt] == ["user", "assistant"] * 4 + ["user"]
        assert turns == 5

    def test_the_whole_history_has_to_fit(self):
        recipe = options(
            "conversations", num_prompts=3, num_turns="3", input_len="10", output_len="20"
        )
        (request, *_) = make_requests(recipe, DEMO)
        final = request
        while (after := final.follow_up("")) is not None:
            final = after
        needed = count_chat(final.prompt) + 3 * 20
        assert make_requests(recipe, replace(DEMO, max_model_len=needed))
        with pytest.raises(ConfigError, match=f"^conversation 1 does not fit: .* {needed} tokens"):
            make_requests(recipe, replace(DEMO, max_model_len=needed - 1))

    def test_the_default_fits_the_demo_model(self):
        assert len(make_requests(options("conversations", num_prompts=300), DEMO)) == 300

    @pytest.mark.parametrize("prompt_format", ["ids", "text"])
    def test_only_chats_go_on(self, prompt_format):
        with pytest.raises(ConfigError, match="dataset_name must not be conversations where"):
            options("conversations", prompt_format=prompt_format)


class TestShareGpt:
    def test_the_bundled_file_holds_what_the_demo_model_knows(self):
        known = {(question.question, question.answer) for question in load_questions()}
        asked, turns = set(), Counter()
        for entry in json.loads(Path(SHAREGPT).read_text()):
            said = [m["value"] for m in entry["conversations"] if m["from"] != "system"]
            asked |= set(zip(said[::2], said[1::2], strict=True))
            turns[len(said) // 2] += 1
        assert asked <= known
        assert turns[1] >= 20 and sum(turns[n] for n in turns if n > 1) >= 20

    def test_the_demo_model_answers_every_turn_word_for_word(self):
        llm = LLM("demo", max_model_len=512)
        answers = {question.question: question.answer for question in load_questions()}
        going = make_requests(options("sharegpt", prompt_format="chat", num_prompts=80), DEMO)
        asked = 0
        while going:
            asked += len(going)
            outputs = llm.generate(
                [render(request.prompt) for request in going], [greedy(r) for r in going]
            )
            said = [output.outputs[0].text for output in outputs]
            assert said == [answers[request.prompt[-1]["content"]] for request in going]
            after = [request.follow_up(text) for request, text in zip(going, said, strict=True)]
            going = [request for request in after if request is not None]
        assert asked == 148

    def test_chats_have_all_turns_and_the_recorded_lengths(self):
        requests = make_requests(options("sharegpt", prompt_format="chat", num_prompts=80), DEMO)
        answers = {question.question: question.answer for question in load_questions()}
        assert sum(len(request.later) + 1 for request in requests) > 120
        for request in requests:
            assert [m["role"] for m in request.prompt] in (["user"], ["system", "user"])
            assert request.max_tokens == count_text(answers[request.prompt[-1]["content"]])
            assert all(t.max_tokens == count_text(answers[t.content]) for t in request.later)

    @pytest.mark.parametrize("prompt_format", [None, "text", "ids"])
    def test_prompts_are_the_first_questions(self, prompt_format):
        recipe = options("sharegpt", num_prompts=80, prompt_format=prompt_format)
        requests = make_requests(recipe, DEMO)
        prompts = {request.prompt for request in requests}
        if prompt_format == "ids":
            prompts = {tokenizer().decode(list(prompt)) for prompt in prompts}
        assert len(prompts) == 80
        assert prompts <= {question.question for question in load_questions()}
        assert not any(request.later for request in requests)

    def test_a_short_file_is_gone_through_again(self):
        requests = make_requests(options("sharegpt", num_prompts=100), DEMO)
        assert requests[80:] == requests[:20]
        assert len({request.prompt for request in requests}) == 80

    def test_another_seed_is_another_order(self):
        made = [make_requests(options("sharegpt", seed=n, num_prompts=80), DEMO) for n in (0, 1)]
        assert made[0] != made[1]
        assert {request.prompt for request in made[0]} == {request.prompt for request in made[1]}

    def test_answers_may_have_another_length(self):
        requests = make_requests(options("sharegpt", output_len="uniform:min=3,max=5"), DEMO)
        assert {request.max_tokens for request in requests} == {3, 4, 5}

    def test_roles_and_gaps_of_the_wild(self, tmp_path):
        chats = [
            [("gpt", "Hello"), ("human", "one"), ("gpt", "first"), ("human", "two")],
            [("system", "Be"), ("user", "three"), ("chatgpt", "a"), ("user", "b"), ("bing", "c")],
            [("human", "alone")],
            [("human", "five"), ("human", "six"), ("gpt", "seven")],
            [("human", ""), ("gpt", "eight")],
            [],
            [("human", "nine"), ("gpt", "")],
        ]
        made = make_requests(write_chats(tmp_path, chats), DEMO)
        seen = {r.prompt[-1]["content"]: (r.max_tokens, len(r.later)) for r in made}
        assert seen == {"one": (count_text("first"), 0), "three": (1, 1), "nine": (1, 0)}
        (system,) = {r.prompt[0]["content"] for r in made if len(r.prompt) == 2}
        assert system == "Be"

    def test_a_long_conversation_is_named_or_left_out(self, tmp_path):
        chats = [[("human", "short"), ("gpt", "yes")], [("human", "long " * 3000), ("gpt", "no")]]
        recipe = write_chats(tmp_path, chats)
        with pytest.raises(
            ConfigError, match=r"chats.json: entry 2 does not fit: .* skip_too_long"
        ):
            make_requests(recipe, DEMO)
        made = make_requests(replace(recipe, skip_too_long=True, num_prompts=3), DEMO)
        assert [request.prompt[0]["content"] for request in made] == ["short"] * 3

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('[\n {"conversations": ]', r"chats.json:2: is not JSON"),
            ("{}", "chats.json: must hold an array of conversations"),
            ("[]", "chats.json holds no request"),
            ('[{"conversations": [{"from": "human", "value": "a"}]}]', "holds no request"),
            ("[3]", "chats.json: entry 1: needs conversations"),
            ('[{"conversations": []}, {"turns": []}]', "entry 2: needs conversations"),
            ('[{"conversations": [{"from": "human"}]}]', "entry 1: needs conversations"),
            (
                '[{"conversations": [{"from": "human", "value": 3}]}]',
                "entry 1: from and value must",
            ),
        ],
    )
    def test_bad_files_are_one_line(self, text, message, tmp_path):
        path = tmp_path / "chats.json"
        path.write_text(text)
        with pytest.raises(ConfigError, match=message) as caught:
            make_requests(options("sharegpt", dataset_path=str(path)), DEMO)
        assert "\n" not in str(caught.value)


def write_chats(folder, chats):
    entries = [{"conversations": [{"from": a, "value": b} for a, b in chat]} for chat in chats]
    path = folder / "chats.json"
    path.write_text(json.dumps(entries))
    return options("sharegpt", dataset_path=str(path), prompt_format="chat", num_prompts=3)


def line(timestamp=0, input_length=10, output_length=3, hash_ids=(1,)):
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": list(hash_ids),
    }


def write_trace(folder, *lines, **values):
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return options("trace", dataset_path=str(path), **values)


class TestTrace:
    def test_the_bundled_trace_fits_the_demo_model_and_shares(self):
        requests = make_requests(options("trace"), IDS)
        entries = [json.loads(text) for text in Path(TRACE).read_text().splitlines()]
        assert len(requests) == len(entries)
        for request, entry in zip(requests, entries, strict=True):
            assert len(request.prompt) == entry["input_length"]
            assert request.max_tokens == entry["output_length"]
            assert request.arrival_s == entry["timestamp"] / 1e3
        prefixes = Counter(r.prompt[:512] for r in requests if len(r.prompt) > 512)
        assert max(prefixes.values()) >= 10

    @given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1), seeds)
    def test_equal_ids_are_equal_tokens(self, ids, seed):
        with pytest.MonkeyPatch.context() as patch:
            text = "\n".join(
                json.dumps(line(input_length=8 * len(row) - n % 8, hash_ids=row))
                for n, row in enumerate(ids)
            )
            patch.setattr(Path, "read_text", lambda *_, **__: text)
            requests = make_requests(options("trace", seed=seed, trace_block_size=8), IDS)
        blocks = {}
        for row, request in zip(ids, requests, strict=True):
            for position, hash_id in enumerate(row):
                block = request.prompt[8 * position : 8 * position + 8]
                known = blocks.setdefault(hash_id, block)
                shorter = min(len(known), len(block))
                assert known[:shorter] == block[:shorter]
                blocks[hash_id] = max(known, block, key=len)
        whole = [block[:1] + block[1:] for block in blocks.values() if len(block) == 8]
        assert len(set(whole)) == len(whole)

    def test_requests_come_in_their_order_from_the_first_on(self, tmp_path):
        lines = [line(5000, output_length=2), line(4000, output_length=1), line(9000.5)]
        requests = make_requests(write_trace(tmp_path, *lines), IDS)
        assert [request.max_tokens for request in requests] == [1, 2, 3]
        assert [request.arrival_s for request in requests] == [0, 1, 5.0005]
        faster = make_requests(write_trace(tmp_path, *lines, trace_speedup=10), IDS)
        assert [request.arrival_s for request in faster] == pytest.approx([0, 0.1, 0.50005])
        assert len(make_requests(write_trace(tmp_path, *lines, num_prompts=2), IDS)) == 2

    @pytest.mark.parametrize("prompt_format", ["text", "chat"])
    def test_texts_have_the_recorded_length_and_share(self, prompt_format):
        requests = make_requests(options("trace", prompt_format=prompt_format), DEMO)
        as_ids = make_requests(options("trace"), IDS)
        count = count_text if prompt_format == "text" else count_chat
        assert [count(request.prompt) for request in requests] == [len(r.prompt) for r in as_ids]

    def test_blank_lines_and_separators_of_other_alphabets_are_no_lines(self, tmp_path):
        path = tmp_path / "trace.jsonl"
        odd = json.dumps(line() | {"note": "a\u2028b\x85c"}, ensure_ascii=False)
        path.write_text(f"\n{odd}\n\n  \n{odd}\n{{", encoding="utf-8")
        with pytest.raises(ConfigError, match="trace.jsonl:6: needs"):
            make_requests(options("trace", dataset_path=str(path)), IDS)

    @pytest.mark.parametrize(
        ("entry", "message"),
        [
            ("[1]", "needs a JSON object with timestamp, input_length, output_length and hash_ids"),
            ("{", "needs a JSON object"),
            ('{"timestamp": 0}', "needs a JSON object"),
            (json.dumps(line(hash_ids=()) | {"hash_ids": None}), "needs a JSON object"),
            (json.dumps(line(timestamp=-1)), "timestamp must be a number from 0, got -1"),
            (json.dumps(line(timestamp="now")), "timestamp must be a number from 0, got 'now'"),
            (json.dumps(line(timestamp=float("nan"))), "timestamp must be a number"),
            (json.dumps(line(input_length=0)), "input_length must be an integer from 1"),
            (json.dumps(line(input_length=2.5)), "input_length must be an integer from 1"),
            (json.dumps(line(output_length=0)), "output_length must be an integer from 1"),
            (json.dumps(line(output_length=True)), "output_length must be an integer from 1"),
            (json.dumps(line(hash_ids=["a"])), "hash_ids must be integers from 0, got"),
            (json.dumps(line(hash_ids=[-1])), "hash_ids must be integers from 0, got"),
            (json.dumps(line() | {"hash_ids": "a"}), "hash_ids must be integers from 0, got"),
            (
                json.dumps(line(input_length=513)),
                r"hash_ids must be 2, one for each 512 of the 513 tokens \(option "
                r"trace_block_size\), got 1",
            ),
            (json.dumps(line(hash_ids=[1, 2])), "hash_ids must be 1, one for each 512"),
        ],
    )
    def test_a_malformed_line_is_named_with_its_number(self, entry, message, tmp_path):
        path = tmp_path / "trace.jsonl"
        path.write_text(f"{json.dumps(line())}\n\n{entry}\n")
        with pytest.raises(ConfigError, match=f"trace.jsonl:3: {message}") as caught:
            make_requests(options("trace", dataset_path=str(path)), IDS)
        assert "\n" not in str(caught.value)

    def test_a_line_that_does_not_fit_is_named_or_left_out(self, tmp_path):
        recipe = write_trace(tmp_path, line(), line(5, 2000, 49, range(4)), line(7))
        with pytest.raises(ConfigError, match="trace.jsonl:2 does not fit: .* 2049 tokens"):
            make_requests(recipe, IDS)
        assert len(make_requests(replace(recipe, skip_too_long=True), IDS)) == 2

    def test_a_line_shorter_than_the_template_is_named(self, tmp_path):
        recipe = write_trace(tmp_path, line(), line(input_length=3), prompt_format="chat")
        with pytest.raises(ConfigError, match="trace.jsonl:2: input_length must be above 3"):
            make_requests(recipe, DEMO)

    def test_an_empty_trace_is_refused(self, tmp_path):
        with pytest.raises(ConfigError, match="trace.jsonl holds no request"):
            make_requests(write_trace(tmp_path), IDS)

    def test_memory_is_for_references_only(self, tmp_path):
        requests = make_requests(write_trace(tmp_path, line(), line(7)), IDS)
        pairs = zip(requests[0].prompt, requests[1].prompt, strict=True)
        assert all(one is other for one, other in pairs)


class TestOptions:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            (
                {"dataset_name": "sonnet"},
                "option dataset_name must be one of random, shared-prefix",
            ),
            ({"num_prompts": 0}, "option num_prompts must be an integer from 1"),
            ({"prompt_format": "audio"}, "option prompt_format must be one of ids, text, chat"),
            ({"seed": -1}, "option seed must be an integer from 0"),
            ({"trace_speedup": 0}, "option trace_speedup must be a number above 0"),
            (
                {"dataset_name": "sharegpt"},
                "option dataset_path must name the file of the sharegpt",
            ),
            ({"dataset_name": "trace"}, "option dataset_path must name the file of the trace"),
        ],
    )
    def test_mistakes_are_named(self, values, message):
        with pytest.raises(ConfigError, match=f"^{message}"):
            WorkloadOptions(**values)

    @pytest.mark.parametrize("name", ["sharegpt", "trace"])
    def test_files_that_cannot_be_read(self, name, tmp_path):
        missing = tmp_path / "missing"
        with pytest.raises(ConfigError, match=f"^cannot read {missing}: No such file"):
            make_requests(options(name, dataset_path=str(missing)), DEMO)
        binary = tmp_path / "binary"
        binary.write_bytes(b'{"a": "\xff"}')
        with pytest.raises(ConfigError, match=f"^cannot read {binary}: byte 7 is not UTF-8"):
            make_requests(options(name, dataset_path=str(binary)), DEMO)

    def test_every_option_explains_itself(self):
        assert all(spec.metadata["help"] for spec in fields(WorkloadOptions))

    @pytest.mark.parametrize(
        ("values", "needs"),
        [
            ({"prompt_format": "text"}, "text prompts"),
            ({"prompt_format": "chat"}, "chat prompts"),
            ({"dataset_name": "conversations"}, "conversations"),
            ({"dataset_name": "sharegpt"}, "prompts of a sharegpt dataset"),
            ({"dataset_name": "trace", "prompt_format": "text"}, "text prompts"),
        ],
    )
    def test_text_needs_a_tokenizer(self, values, needs):
        with pytest.raises(ConfigError, match=f"^{needs} need the model's tokenizer; give --tok"):
            make_requests(options(**{"name": values.pop("dataset_name", "random")} | values), IDS)

    def test_ids_need_the_size_of_the_vocabulary_and_texts_do_not(self):
        unknown = replace(DEMO, vocab_size=None)
        assert make_requests(options(prompt_format="text"), unknown)
        with pytest.raises(ConfigError, match="token ids need the model's --vocab-size"):
            make_requests(options(), unknown)

    def test_a_tokenizer_that_cannot_be_loaded(self, tmp_path):
        material = replace(DEMO, tokenizer=str(tmp_path))
        with pytest.raises(ConfigError, match="cannot be loaded; give a folder that") as caught:
            make_requests(options(prompt_format="text"), material)
        assert "\n" not in str(caught.value)
