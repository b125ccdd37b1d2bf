"""Tokenizers are those of transformers: every layout of files, in hundreds of random cases each."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from tokenizer_layouts import LAYOUTS, random_ids, random_texts
from transformers import AutoTokenizer

from paged_backend.text.chat import Chat
from paged_backend.text.detokenizer import Detokenizer, text_of_prompt
from paged_backend.text.text_stream import TextStream
from paged_backend.text.tokenizer import Tokenizer, load_tokenizer
from paged_backend.values.outputs import FinishReason
from paged_backend.values.sampling_params import SamplingParams

CASES = examples(300)
Pair = tuple[Tokenizer, Any]


@pytest.fixture(scope="module", params=LAYOUTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Our tokenizer of a folder, and transformers'."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    LAYOUTS[request.param](folder)
    return load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)


def encoded(pair: Pair, seed: int) -> Iterator[list[int]]:
    ours, _ = pair
    yield from ours.encode_batch(random_texts(CASES, seed))


def decode(theirs: Any, token_ids: list[int], skip: bool) -> str:
    return theirs.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def test_what_is_known_about_tokens(pair: Pair) -> None:
    ours, theirs = pair
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.added_tokens == theirs.get_added_vocab()
    assert ours.special_token_ids == set(theirs.all_special_ids) | {
        token_id for token_id, token in theirs.added_tokens_decoder.items() if token.special
    }


@pytest.mark.parametrize("special", [True, False])
def test_encoding(pair: Pair, special: bool) -> None:
    ours, theirs = pair
    texts = random_texts(CASES, seed=1)
    expected = theirs(texts, add_special_tokens=special).input_ids
    assert ours.encode_batch(texts, add_special_tokens=special) == expected


@pytest.mark.parametrize("skip", [True, False])
def test_decoding(pair: Pair, skip: bool) -> None:
    ours, theirs = pair
    for token_ids in (*random_ids(CASES, ours.vocab_size), *encoded(pair, seed=2)):
        assert ours.decode(token_ids, skip_special_tokens=skip) == decode(theirs, token_ids, skip)


@pytest.mark.parametrize("skip", [True, False])
def test_prompt_and_stream_are_the_text_of_all_tokens_wherever_the_prompt_ends(
    pair: Pair, skip: bool
) -> None:
    ours, theirs = pair
    draw = random.Random(3)
    for token_ids in encoded(pair, seed=3):
        split = draw.randint(0, len(token_ids))
        prompt, rest = token_ids[:split], token_ids[split:]
        detokenizer = Detokenizer(ours, skip_special_tokens=skip, prompt=prompt)
        pieces = [detokenizer.append([token_id]) for token_id in rest]
        text = text_of_prompt(ours, prompt, skip_special_tokens=skip)
        whole = "".join([text, *pieces, detokenizer.finish()])
        assert whole == decode(theirs, token_ids, skip)


def test_a_stream_that_is_resumed_for_each_token_continues_the_prompt(pair: Pair) -> None:
    ours, theirs = pair
    params = SamplingParams(max_tokens=None)
    draw = random.Random(4)
    for token_ids in list(encoded(pair, seed=4))[:200]:
        split = draw.randint(0, len(token_ids))
        prompt, rest = token_ids[:split], token_ids[split:]
        stream = TextStream(ours, params, prompt=prompt)
        text = text_of_prompt(ours, prompt, skip_special_tokens=True)
        for count, token_id in enumerate(rest, 1):
            reason = FinishReason.LENGTH if count == len(rest) else None
            resumed = TextStream.resume(ours, params, stream.state)
            text += resumed.append([token_id], reason).text
            stream.append([token_id], reason)
        if rest:
            assert text == decode(theirs, token_ids, True)


def test_a_rendered_chat_begins_with_bos_once(pair: Pair) -> None:
    ours, theirs = pair
    chats = [[{"role": "user", "content": text}] for text in random_texts(CASES, seed=5)]
    render = functools.partial(theirs.apply_chat_template, chats, add_generation_prompt=True)
    texts, expected = render(tokenize=False), render(tokenize=True).input_ids
    assert ours.chat_template is not None
    assert ours.chat_template.render(Chat.from_json(chats[7])) == texts[7]
    assert ours.encode_prompts(texts, add_special_tokens=False) == expected
    if theirs.bos_token_id is not None:
        for ids, written in zip(ours.encode_prompts(texts), expected, strict=True):
            assert ids[: len(written)] == written  # an end of text may follow


@pytest.mark.parametrize("text", ["<s>Hello", "<s> the"])
def test_a_text_that_begins_with_bos_gets_no_second_one(pair: Pair, text: str) -> None:
    ours, theirs = pair
    if theirs.bos_token_id is None or theirs.split_special_tokens:
        pytest.skip("the text does not begin with bos")
    (ids,) = ours.encode_prompts([text])
    assert ids.count(theirs.bos_token_id) == 1
    assert ids[-len(theirs.encode(text)) + 1 :] == theirs.encode(text)[1:]
