"""Sampling on the device, compared with sampling on the host from the same requests."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from paged_backend.core.scheduled_batch import SampleSpec
from paged_backend.core.sequence import PLACEHOLDER
from paged_backend.platforms.gpu.sampler import DeviceSampler, SampleRows
from paged_backend.platforms.gpu.transfer import Transfer
from paged_backend.platforms.select import gpu_of
from paged_backend.sampling.sampler import Sampler
from paged_backend.values.sampling_params import SamplingParams

VOCAB = 61
EOS = frozenset({2, 60})

SETTINGS = {
    "greedy": {},
    "repetition": {"repetition_penalty": 1.8},
    "rewarded repetition": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -1.0},
    "all penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.7,
    },
    "min_tokens": {"min_tokens": 3, "stop_token_ids": [7, 9, 100_000]},
    "no stop at any position": {"min_tokens": 2**31 - 1, "stop_token_ids": [7]},
    "top_k of one": {"temperature": 1.0, "top_k": 1},
    "bias": {"logit_bias": {2: -50, 7: 3.5, 11: 6}},
    "allowed": {"allowed_token_ids": [4, 9, 11, 40]},
    "bad words": {
        "allowed_token_ids": [4, 9, 11],
        "bad_words_token_ids": [[4, 9], [9, 9], [11, 4, 11], [9, 11], [4, 4, 4, 4]],
    },
    "bias and penalties": {"logit_bias": {2: 4}, "presence_penalty": 1.0, "min_tokens": 2},
}


def transfer_to(device: torch.device) -> Transfer:
    return Transfer(device, gpu_of(device))


class Sequences:
    """Sequences that grow by what is sampled from random logits, in rows in no order."""

    def __init__(self, settings: list[dict], device: torch.device) -> None:
        self.device = device
        self.rows = torch.randperm(len(settings) + 2)[: len(settings)].tolist()
        self.tokens = [torch.randint(VOCAB, (4 + i,)).tolist() for i in range(len(settings))]
        self.prompts = [len(tokens) for tokens in self.tokens]
        self.params = [
            SamplingParams.from_mapping({"temperature": 0.0, "max_tokens": None, **values})
            for values in settings
        ]

    def specs(self, *, hide_last: bool = False) -> list[SampleSpec]:
        """What the sampler hears; a step that is planned ahead does not know the last token."""
        specs = []
        for i, (params, tokens, prompt) in enumerate(
            zip(self.params, self.tokens, self.prompts, strict=True)
        ):
            if hide_last and len(tokens) > prompt:
                tokens = [*tokens[:-1], PLACEHOLDER]
            specs.append(SampleSpec(i, params, 2**64 - 1 - i, len(tokens), prompt, tokens))
        return specs

    def step(self, sampler: DeviceSampler, padding: int, *, hide_last: bool = False) -> None:
        """Sample once with each; the host's sampler knows all tokens."""
        count = len(self.rows)
        logits = torch.randn(count + padding, VOCAB) * 3
        logits[:, [2, 7, 9, 60]] += 4  # stops are likely
        wanted = Sampler(EOS).sample(logits[:count].clone(), self.specs())
        padding_row = len(sampler.last_tokens) - 1
        rows = self.rows + [padding_row] * padding
        positions = [len(tokens) for tokens in self.tokens] + [0] * padding
        last_inputs = [tokens[-1] for tokens in self.tokens] + [0] * padding
        row_or_none = self.rows + [-1] * padding
        to = SampleRows(
            torch.tensor(rows, device=self.device),
            torch.tensor(row_or_none, dtype=torch.int32, device=self.device),
            torch.tensor(positions, dtype=torch.int32, device=self.device),
        )
        got = torch.empty(count + padding, dtype=torch.int32, device=self.device)
        on_device = logits.to(self.device)
        sampler.sample(on_device, to, got)  # as a step does before it knows what requests change
        sampler.change_and_sample(
            on_device,
            self.specs(hide_last=hide_last),
            torch.tensor(last_inputs, device=self.device),
            to,
            got,
        )
        assert got.tolist()[:count] == wanted
        assert sampler.last_tokens[self.rows].tolist() == wanted
        for tokens, token in zip(self.tokens, wanted, strict=True):
            tokens.append(token)


def rows(number, device):
    """Memory for the last token of each row."""
    return torch.zeros(number, dtype=torch.int32, device=device)


@pytest.mark.parametrize("padding", [0, 3])
def test_tokens_equal_those_of_the_host(device, padding):
    sampler = DeviceSampler(
        rows(len(SETTINGS) + 3, device), VOCAB, EOS, Transfer(device, gpu_of(device))
    )
    for _ in range(2):  # the second time other sequences take the rows
        sequences = Sequences(list(SETTINGS.values()), device)
        sampler.admit(sequences.rows, sequences.specs())
        for step in range(6):
            sequences.step(sampler, padding, hide_last=step % 2 == 1)


def test_a_sequence_may_come_back_with_output(device):
    sampler = DeviceSampler(rows(4, device), VOCAB, EOS, transfer_to(device))
    sequences = Sequences([{"frequency_penalty": 1.0}, {"presence_penalty": 2.0}], device)
    for tokens in sequences.tokens:
        tokens += [5, 5, 9]
    sampler.admit(sequences.rows, sequences.specs())
    for _ in range(4):
        sequences.step(sampler, padding=0)


class CountingTransfer(Transfer):
    num_sent = 0

    def send(self, values: np.ndarray) -> torch.Tensor:
        self.num_sent += 1
        return super().send(values)


def test_newcomers_are_sent_in_one_copy(device):
    transfer = CountingTransfer(device, gpu_of(device))
    sampler = DeviceSampler(rows(8, device), VOCAB, EOS, transfer)
    settings = [{"top_k": 5 + i, "stop_token_ids": [i]} for i in range(5)]
    sequences = Sequences(settings, device)
    sampler.admit(sequences.rows, sequences.specs())
    assert transfer.num_sent == 1
    assert sampler._state.top_k[sequences.rows].tolist() == [5, 6, 7, 8, 9]
    assert sampler._state.seed[sequences.rows].tolist() == [-1 - i for i in range(5)]
    stops = sampler._penalties.stop_ids
    assert stops[sequences.rows, : len(EOS) + 1].tolist() == [[*sorted(EOS), i] for i in range(5)]
    others = [row for row in range(8) if row not in sequences.rows]
    assert torch.all(stops[others] == -1) and torch.all(sampler._state.top_k[others] == 0)
    # Kernels are compiled for arrays that begin at multiples of 16 bytes.
    arrays = [getattr(sampler._state, field.name) for field in fields(sampler._state)]
    assert all(array.data_ptr() % 16 == 0 and array.is_contiguous() for array in arrays)
