"""Measures what a number format costs in quality: an engine and a reference in float32.

Both engines run in this process, one after the other for each batch of prompts. They answer the
prompts greedily. Then both compute the logits of every token of the reference's answers, and the
distributions of each position are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from paged_backend.checkpoint.hub import resolve_checkpoint
from paged_backend.checkpoint.model_config import ModelConfig, load_model_config
from paged_backend.engine.engine import Engine
from paged_backend.engine.executors import open_executor
from paged_backend.tools.bench.divergence import Divergences, Logits
from paged_backend.tools.bench.environment import environment
from paged_backend.tools.bench.quality_options import PromptOptions
from paged_backend.tools.bench.quality_prompts import QualityPrompt, make_prompts
from paged_backend.tools.bench.quality_report import AnswerFigures, NumberFormat, QualityReport
from paged_backend.values import engine_args
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.options.cpu import HIGHEST
from paged_backend.values.outputs import SequenceOutput
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

# Of both engines, unless the option says more: neither may take all memory that a GPU has left.
KV_CACHE_BYTES = 2**30
# Of the prompt and the answer that are compared: 2 GiB of logits in each engine.
MAX_LOGITS = 2**29


class ScoredEngine:
    """An engine that answers prompts, and that returns the logits of given answers.

    Raises:
        ConfigError: the options or the checkpoint cannot be used.
    """

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        worker = open_executor(config, folder)
        self.device = worker.platform.device
        self.info = worker.info
        self._engine = Engine(config, worker)

    def answers(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """Return the greedy answers, with the end-of-sequence token where there is one.

        Raises:
            InvalidRequest: a prompt has tokens that the model does not know.
        """
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        outputs = self._run(
            [Request(str(index), prompt, params) for index, prompt in enumerate(prompts)]
        )
        return [
            [token for output in outputs[str(index)] for token in output.new_token_ids]
            for index in range(len(prompts))
        ]

    def logits(self, prompt: list[int], answer: list[int]) -> Iterator[Logits]:
        """Yield the logits that each token of an answer is chosen from, given all before it.

        The answer is part of a prompt, so both engines see the same tokens at each position. With
        a quantized KV cache the logits are those of a server that decodes, as every token attends
        to stored numbers only: a layer writes the keys and values of all tokens of a step to the
        cache, in the cache's format, before its attention reads them. This holds for the token's
        own key and value, and for tokens of a prompt, which are not answered from a prefix cache.
        """
        # The logits after the last token of the answer would predict a token that is not in it.
        tokens = prompt + answer[:-1]
        params = SamplingParams(
            temperature=0, max_tokens=1, ignore_eos=True, return_context_logits=True
        )
        (output,) = self._run([Request("logits", tokens, params)])["logits"]
        assert output.prompt_logprobs is not None and output.logprobs is not None
        # The first entry of a prompt belongs to its second token.
        for entry in output.prompt_logprobs[len(prompt) - 1 :] + output.logprobs:
            assert entry.logits is not None
            yield np.frombuffer(entry.logits, "<f4")

    def _run(self, requests: Sequence[Request]) -> dict[str, list[SequenceOutput]]:
        """Run requests together; returns the outputs of each by its id."""
        outputs: dict[str, list[SequenceOutput]] = {item.request_id: [] for item in requests}
        for request in requests:
            self._engine.add_request(request)
        while self._engine.has_unfinished:
            for output in self._engine.step():
                outputs[output.request_id].append(output)
        return outputs


class QualityBench:
    """Compares the engine of the given options with its reference.

    Raises:
        ConfigError: the options, the prompts or the checkpoint cannot be used.
    """

    def __init__(self, options: Mapping[str, Any], prompt_options: PromptOptions) -> None:
        config = engine_args.from_mapping(options).config
        if config.load_format == "dummy":
            raise option_error(
                "load_format", "must be auto: random weights have no quality to lose, got dummy"
            )
        self._name = Path(config.model).name
        checkpoint = resolve_checkpoint(config)
        folder = checkpoint.model
        shape = load_model_config(folder)
        self._prompts = make_prompts(
            prompt_options,
            model=folder,
            tokenizer=str(checkpoint.tokenizer),
            vocab_size=shape.vocab_size,
            seed=config.seed,
        )
        config, self._max_tokens = _fitted(config, shape, self._prompts, prompt_options.max_tokens)
        self._tested = ScoredEngine(config, folder)
        self._reference = ScoredEngine(reference_config(config), folder)

    def run(self, *, concurrency: int, command: str) -> QualityReport:
        """Answer the prompts, `concurrency` of them at a time, and compare.

        Raises:
            InvalidRequest: a prompt has tokens that the model does not know.
            ConfigError: the numbers of a format do not suffice for the model.
        """
        divergences = Divergences()
        tested: list[list[int]] = []
        reference: list[list[int]] = []
        prompts = [prompt.token_ids for prompt in self._prompts]
        with tqdm(total=len(prompts), unit="prompt", leave=False, disable=None) as bar:
            for start in range(0, len(prompts), concurrency):
                batch = prompts[start : start + concurrency]
                tested += self._tested.answers(batch, self._max_tokens)
                reference += self._reference.answers(batch, self._max_tokens)
                for number, prompt in enumerate(batch, start):
                    self._compare(number, prompt, reference[number], divergences)
                    bar.update()
        return QualityReport(
            command=command,
            model=self._name,
            tested=NumberFormat.of(self._tested.info),
            reference=NumberFormat.of(self._reference.info),
            num_prompts=len(prompts),
            num_prompt_tokens=sum(map(len, prompts)),
            answers=_compare_answers(self._prompts, tested, reference),
            divergence=divergences.figures(),
            environment=environment(self._tested.device),
        )

    def _compare(
        self, number: int, prompt: list[int], answer: list[int], divergences: Divergences
    ) -> None:
        """Add the positions of one answer; only its logits are in memory."""
        rows = zip(
            self._reference.logits(prompt, answer),
            self._tested.logits(prompt, answer),
            strict=True,
        )
        for position, (reference, tested) in enumerate(rows, 1):
            if not np.isfinite(divergences.add(reference, tested)):
                raise ConfigError(
                    f"the logits of token {position} of answer {number + 1} are not finite: the "
                    "format cannot hold what the model computes"
                )


def reference_config(config: EngineConfig) -> EngineConfig:
    """Return the options of the reference: float32, as far as the checkpoint has its numbers."""
    return replace(
        config,
        dtype="float32",
        float32_matmul_precision=HIGHEST,
        quantization=None,
        kv_cache_dtype="auto",
    )


def _fitted(
    config: EngineConfig, shape: ModelConfig, prompts: Sequence[QualityPrompt], max_tokens: int
) -> tuple[EngineConfig, int]:
    """Return the options of the engines for these prompts, and the tokens of an answer at most.

    Raises:
        ConfigError: a prompt is too long for the model, or its logits for the memory.
    """
    longest = max(len(prompt.token_ids) for prompt in prompts) + max_tokens
    # A pool must hold a whole request: by default that would be one of the model's context length.
    max_model_len = config.max_model_len or min(longest, shape.max_position_embeddings)
    for number, prompt in enumerate(prompts, 1):
        if len(prompt.token_ids) >= max_model_len:
            raise ConfigError(
                f"prompt {number} has {len(prompt.token_ids)} tokens, and with max_model_len "
                f"{max_model_len} it can have {max_model_len - 1}"
            )
    num_tokens, most = min(longest, max_model_len), MAX_LOGITS // shape.vocab_size
    if num_tokens > most:
        raise ConfigError(
            f"a prompt and its answer can have {most} tokens with a vocabulary of "
            f"{shape.vocab_size}, got {num_tokens}; shorten the prompts or lower --max-tokens"
        )
    fitted = replace(
        config,
        max_model_len=max_model_len,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes or KV_CACHE_BYTES,
        # Limits of clients, which would also hold for answers that are scored as prompts.
        max_prompt_tokens=None,
        max_output_tokens=None,
    )
    return fitted, min(max_tokens, max_model_len)


def _compare_answers(
    prompts: Sequence[QualityPrompt], tested: Sequence[list[int]], reference: Sequence[list[int]]
) -> AnswerFigures:
    right = [prompt.right_answer for prompt in prompts if prompt.right_answer is not None]
    has_right = len(right) == len(prompts)
    return AnswerFigures(
        num_tokens=sum(map(len, reference)),
        num_equal=_num_equal(tested, reference),
        num_right=_num_equal(tested, right) if has_right else None,
        num_right_of_reference=_num_equal(reference, right) if has_right else None,
    )


def _num_equal(answers: Sequence[list[int]], others: Sequence[list[int]]) -> int:
    return sum(answer == other for answer, other in zip(answers, others, strict=True))
