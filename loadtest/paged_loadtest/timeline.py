"""One call as its client saw it, and the only definitions of the latencies.

They are those of vLLM's ``bench serve``, in its words; where NVIDIA's AIPerf has another word for
the same, it is named:

TTFT  from sending the call to the first chunk that brings a token
ITL   each gap between two chunks that bring tokens, pooled over all calls (AIPerf: inter-chunk
      latency); a chunk may hold several tokens
TPOT  (E2E - TTFT) / (output tokens - 1) of a call with two tokens or more (AIPerf: inter-token
      latency)
E2E   from sending the call to its last chunk that brings a token (AIPerf: request latency)
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Timeline:
    """Times are seconds of ``time.perf_counter``; token counts are the server's."""

    sent_s: float
    arrivals_s: list[float] = field(default_factory=list)  # of chunks that bring tokens
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None  # of the prompt; None where the server does not say
    text: str = ""
    error: str | None = None  # why the call failed; what came before is kept

    @property
    def is_success(self) -> bool:
        """Whether the whole answer came."""
        return self.error is None and bool(self.arrivals_s)

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.arrivals_s[0] - self.sent_s

    @property
    def itl_s(self) -> list[float]:
        """Gaps between chunks."""
        times = self.arrivals_s
        return [after - before for before, after in zip(times, times[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time for each token after the first; None for a single token."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """Time to the last token."""
        return self.arrivals_s[-1] - self.sent_s
