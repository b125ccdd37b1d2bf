"""The engine: one object that turns requests into tokens, a step at a time.

It knows neither text nor sockets. :class:`paged_backend.LLM` runs it in-process, and
``paged_backend.process`` runs it in a separate process.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from paged_backend.core.beams import num_candidates
from paged_backend.core.block_hash import load_or_create_key
from paged_backend.core.compiling import (
    CompilingRequest,
    CompilingRequests,
    GrammarCompiler,
    Progress,
)
from paged_backend.core.drafter import Drafter
from paged_backend.core.fairness.fair_queue import FairQueue
from paged_backend.core.kv_cache_manager import KVCacheManager
from paged_backend.core.scheduler import Scheduler
from paged_backend.core.scheduler_config import SchedulerConfig
from paged_backend.core.scheduler_output import (
    DrawnDrafts,
    ModelRunnerOutput,
    PendingOutput,
    SchedulerOutput,
)
from paged_backend.core.stopping import EndConditions
from paged_backend.engine.adapters import Adapters
from paged_backend.executor.base import Executor
from paged_backend.speculation.draft_model import ModelDrafter
from paged_backend.speculation.lookup import LookupDrafter
from paged_backend.values.beams import MAX_CANDIDATES
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import InvalidRequest, option_error
from paged_backend.values.log import LOG
from paged_backend.values.lora import numbered
from paged_backend.values.options.speculation import SpeculativeConfig
from paged_backend.values.outputs import (
    EngineStats,
    FinishReason,
    SequenceOutput,
)
from paged_backend.values.pooling_params import PoolingType
from paged_backend.values.request import Request, RequestLimits

MASK_WAIT_S = 0.01  # for a mask, when there is nothing else to do but to look for messages


class Engine:
    """The scheduler of one model over an executor; used by one thread.

    Args:
        config: the engine's options.
        executor: runs the steps.
        drafter: guesses tokens for speculative decoding, in place of the one that the options ask
            for.
        grammars: compiles the grammars of requests; without it no request may have one.
        has_journal: whether to record what the prefix cache holds (``scheduler.kv.journal``).

    Raises:
        ConfigError: the model generates nothing that could be drafted, or a drafter is given and
            the options ask for none.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        drafter: Drafter | None = None,
        grammars: GrammarCompiler | None = None,
        has_journal: bool = False,
    ) -> None:
        self.executor = executor
        info = executor.info
        steps = info.step_limits
        speculation = config.speculation()
        if drafter is None and speculation is not None:
            # Of layers with states, the device has none to go back to.
            draws_ahead = steps.draws_ahead and info.kv_layout.states is None
            drafter = _drafter(speculation, draws_ahead)
        if speculation is not None and info.pooling is not None:
            raise option_error("speculative_config", "cannot be used: this model generates nothing")
        if drafter is not None and speculation is None:
            raise option_error("speculative_config", "must be set, to make room for drafts")
        self.limits = RequestLimits.of(
            config,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            max_num_seqs=steps.max_num_seqs,
            embedding_size=(0 if info.pooling is None or info.scores_pairs else info.hidden_size),
            scores_pairs=info.scores_pairs,
            normalize=info.pooling is not None and info.pooling.normalize,
            speculates=drafter is not None,
            max_loras=0 if executor.adapters is None else config.max_loras,
        )
        # Prefix hits skip hidden states, so only pooling of the last token may use the cache.
        has_all_states = info.pooling is None or info.pooling.kind is PoolingType.LAST
        has_blocks = info.kv_layout.has_blocks
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=steps.max_num_seqs,
                max_num_batched_tokens=steps.max_num_batched_tokens,
                max_model_len=info.max_model_len,
                enable_chunked_prefill=config.enable_chunked_prefill and has_blocks,
                eos_token_ids=frozenset(info.eos_token_ids),
                max_num_drafts=steps.max_num_drafts,
                draws_ahead=drafter is not None and drafter.draws_ahead,
                waits_together=speculation is not None and speculation.is_drawn_by_worker,
                max_loras=config.max_loras,
            ),
            KVCacheManager(
                info.num_blocks,
                info.kv_layout,
                enable_prefix_caching=(
                    config.enable_prefix_caching and has_all_states and has_blocks
                ),
                has_journal=has_journal,
                hash_key=_hash_key(config),
            ),
            FairQueue(config.weights_of_tenants(), fair=config.scheduling_policy == "fair"),
            drafter,
        )
        self._drafter = drafter
        self._grammars = grammars
        self._compiling = CompilingRequests()
        self._seeds = random.Random(config.seed)
        self._in_flight: deque[_InFlightStep] = deque()
        self._last_end_s = 0.0  # end of the last step
        # After `step`.
        self._max_in_flight = int(steps.async_scheduling)
        self.adapters = Adapters(
            executor.adapters,
            config.num_adapters_in_memory,
            # Not a method of this engine, which a cycle of references would keep alive.
            partial(_adapters_in_use, self.scheduler, self._compiling),
            executor.check,
            None if config.runtime_lora_folder is None else Path(config.runtime_lora_folder),
        )
        for lora in numbered(config.lora_modules or {}).values():
            self.adapters.load(lora)

    def add_request(self, request: Request, progress: Progress = ()) -> None:
        """Queue a request.

        Args:
            request: a request that the front end has checked.
            progress: what a previous engine process generated.

        Raises:
            InvalidRequest: the request does not fit this model after all.
        """
        if request.pooling is None:
            self.limits.check(request.prompt_token_ids, request.params)
            self.limits.check_token_ids("prediction", request.predicted_token_ids)
        elif self.limits.scores_pairs:
            self.limits.check_pair(request.prompt_token_ids)
        else:
            self.limits.check_embedding(request.prompt_token_ids, request.pooling)
        if request.params.beam_width > 1:
            self._check_beams(request)
        resolved = self.adapters.resolve(request, progress)
        if resolved is not None:
            self._start(resolved, progress)

    def _start(self, request: Request, progress: Progress) -> None:
        """Queue a request with an adapter in memory, or with none."""
        if not request.grammar:
            self.scheduler.add_request(request, self._seeds.getrandbits(64), progress)
        elif self._grammars is None:
            raise InvalidRequest("structured_outputs", "cannot be used: there is no compiler")
        else:
            grammars = self._grammars.start(request, progress)
            self._compiling.add(CompilingRequest(request, progress, grammars))

    def _check_beams(self, request: Request) -> None:
        """Check that a step can return enough candidates for each beam of a request.

        Raises:
            InvalidRequest: there are too many tokens that end an output, or a grammar.
        """
        if request.grammar:
            raise InvalidRequest("beam_width", "must be 1 with tools or structured_outputs")
        ends = EndConditions.of(request, self.scheduler.config)
        if num_candidates(request.params.beam_width, len(ends.token_ids)) > MAX_CANDIDATES:
            raise InvalidRequest(
                "beam_width",
                f"times the number of end tokens and 1 must be at most {MAX_CANDIDATES}, got "
                f"{request.params.beam_width} and {len(ends.token_ids)} end tokens",
            )

    def abort_request(self, request_id: str) -> None:
        """End a request now; unknown ids are ignored."""
        self.adapters.pop(request_id)
        self._compiling.pop(request_id)
        self.scheduler.cancel_request(request_id)

    def cancel_request(self, request_id: str) -> list[SequenceOutput]:
        """End a request; returns a last output for each completion, none for unknown ids."""
        waiting = self.adapters.pop(request_id) or self._compiling.pop(request_id)
        if waiting is not None:
            return _last_outputs(waiting.request, waiting.progress, FinishReason.ABORT)
        return self.scheduler.cancel_request(request_id)

    def is_open(self, request_id: str) -> bool:
        """Return True if a completion of the request is unfinished."""
        is_waiting = request_id in self.adapters or request_id in self._compiling
        return is_waiting or self.scheduler.is_open(request_id)

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything left for a step."""
        is_waiting = bool(self._in_flight or self._compiling or self.adapters)
        return self.scheduler.has_unfinished or is_waiting

    def step(self) -> list[SequenceOutput]:
        """Schedule and start one step; returns new tokens.

        With asynchronous scheduling these are the tokens of the previous step, so that the device
        computes while the next step is scheduled.
        """
        outputs = self._add_loaded() + self._add_compiled() + self.scheduler.end_early()
        if self._is_idle:
            self.executor.check()  # with adapters that several ranks read
            return outputs
        is_launched, early = self._launch()
        outputs += early
        if is_launched:
            if len(self._in_flight) <= self._max_in_flight:
                return outputs
        elif not self._in_flight:
            self.scheduler.wait_for_mask(MASK_WAIT_S)
            return outputs
        outputs += self.scheduler.update_from_output(self._wait())
        if not self._in_flight and self._max_in_flight and self.scheduler.has_unfinished:
            # All sequences have waited for their tokens, so the device has no step. It gets the
            # next one before the outputs are sent.
            outputs += self._launch()[1]
        return outputs

    def _launch(self) -> tuple[bool, list[SequenceOutput]]:
        """Schedule and start a step, if anything can be computed now.

        Returns:
            True if there is a step, and the outputs of earlier steps that it had to wait for.
        """
        outputs: list[SequenceOutput] = []
        started_s = time.monotonic()
        output = self.scheduler.schedule()
        if not output.num_sequences:
            return False, outputs
        with _logged_if_it_fails(output):
            launched = self.executor.launch(output, self.scheduler.draft_guide())
            if (drawn := launched.drawn_drafts()) is not None:
                self.scheduler.take_drafts(drawn)
            masks = None
            if self.scheduler.is_constrained:
                # The masks depend on the tokens of the previous step, and on the drafts of this
                # one. The device has both before the forward pass that was just launched, so it
                # does not become idle.
                while self._in_flight:
                    outputs += self.scheduler.update_from_output(self._wait())
                if self.scheduler.masks_need_drafts:
                    drafts = launched.drafts_from_texts()
                    self.scheduler.take_drafts(DrawnDrafts(drafts, []))
                masks = self.scheduler.token_masks(launched.greedy_token_ids())
            pending = launched.sample(masks)
        self._in_flight.append(_InFlightStep(started_s, output, pending))
        return True, outputs

    def _add_loaded(self) -> list[SequenceOutput]:
        """Start the requests with adapters that were read; returns outputs of those that failed."""
        outputs: list[SequenceOutput] = []
        for waiting, result in self.adapters.take_ready(wait=self._is_idle):
            if isinstance(result, Request):
                self._start(result, waiting.progress)
            else:
                LOG.warning("an adapter could not be read again: %s", result)
                outputs += _last_outputs(
                    waiting.request, waiting.progress, FinishReason.ERROR, result
                )
        return outputs

    @property
    def _is_idle(self) -> bool:
        """True if only other threads have work."""
        return not (self.scheduler.has_unfinished or self._in_flight)

    def _add_compiled(self) -> list[SequenceOutput]:
        """Queue the requests whose grammars are compiled; returns outputs of those that failed."""
        if not self._compiling:
            return []
        outputs: list[SequenceOutput] = []
        for compiled in self._compiling.take_ready(wait=self._is_idle):
            error = compiled.grammars.exception()
            if error is not None:
                LOG.warning("a grammar that was checked failed: %s", type(error).__name__)
                problem = "structured_outputs: the grammar could not be compiled again"
                outputs += _last_outputs(
                    compiled.request, compiled.progress, FinishReason.ERROR, problem
                )
                continue
            self.scheduler.add_request(
                compiled.request,
                self._seeds.getrandbits(64),
                compiled.progress,
                compiled.grammars.result(),
            )
        return outputs

    def stats(self) -> EngineStats:
        """Counts since the start and the present state."""
        bytes_per_token = self.executor.info.kv_bytes_per_token
        running, waiting = self.scheduler.sequences.adapter_names()
        return replace(
            self.scheduler.stats(),
            kv_bytes_per_token=bytes_per_token,
            running_adapters=running,
            waiting_adapters=tuple(sorted({*waiting, *self.adapters.waiting_names})),
        )

    def _wait(self) -> ModelRunnerOutput:
        """Wait for the earliest step in flight."""
        step = self._in_flight.popleft()
        with _logged_if_it_fails(step.scheduler_output):
            result = step.pending.result()
        now = time.monotonic()
        # A step that was scheduled ahead begins when the previous step is over.
        seconds = now - max(step.started_s, self._last_end_s)
        self._last_end_s = now
        output = step.scheduler_output
        self.scheduler.counters.observe_step(seconds, output.num_sequences, output.num_tokens)
        if self._drafter is not None:
            self._drafter.observe_step(seconds, output)
        return result


def _drafter(speculation: SpeculativeConfig, draws_ahead: bool) -> Drafter:
    """Return the drafter that the options ask for."""
    if speculation.is_drawn_by_worker:
        return ModelDrafter(speculation, draws_ahead=draws_ahead)
    return LookupDrafter(speculation, draws_ahead)


class _InFlightStep(NamedTuple):
    started_s: float  # seconds of the monotonic clock
    scheduler_output: SchedulerOutput
    pending: PendingOutput


def _last_outputs(
    request: Request, progress: Progress, reason: FinishReason, problem: str = ""
) -> list[SequenceOutput]:
    """Return the last output of each completion of a request that has not started."""
    tokens_of_each = progress or [()] * request.params.n
    return [
        SequenceOutput(request.request_id, index, [], reason, problem=problem)
        for index, tokens in enumerate(tokens_of_each)
        if tokens is not None
    ]


def _adapters_in_use(scheduler: Scheduler, compiling: CompilingRequests) -> set[str]:
    """Return the digests of the adapters of unfinished requests."""
    return scheduler.sequences.adapters | {waiting.request.adapter for waiting in compiling}


@contextmanager
def _logged_if_it_fails(output: SchedulerOutput) -> Iterator[None]:
    """Log the step that an exception comes from; it is fatal for the engine."""
    try:
        yield
    except Exception as error:
        LOG.error("a step failed with %s; it was: %s", type(error).__name__, output.describe())
        raise


def _hash_key(config: EngineConfig) -> bytes | None:
    """Return the key of the block hashes; None for a random one.

    Raises:
        ConfigError: the file cannot be used.
    """
    if config.prefix_cache_key_file is None:
        return None
    try:
        return load_or_create_key(Path(config.prefix_cache_key_file))
    except (OSError, ValueError) as error:
        raise option_error("prefix_cache_key_file", f"cannot be used: {error}") from error
