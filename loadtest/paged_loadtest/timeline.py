"""The timeline of one request as its client saw it, and the only definitions of the latencies.

The definitions and names are vLLM's in ``bench serve``; differing names in NVIDIA's AIPerf
are given in parentheses:

TTFT  from sending the request to the first chunk with a token
ITL   each gap between two chunks with tokens, pooled over all requests (AIPerf: inter-chunk
      latency); a chunk may hold several tokens
TPOT  (E2E - TTFT) / (output tokens - 1) of a request with at least two tokens (AIPerf:
      inter-token latency)
E2E   from sending the request to its last chunk with a token (AIPerf: request latency)
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Timeline:
    """Times of one request, in seconds of ``time.perf_counter``, and the server's token counts."""

    sent_s: float
    arrivals_s: list[float] = field(default_factory=list)  # times of chunks with tokens
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None  # prompt tokens from the prefix cache; None if unknown
    text: str = ""
    error: str | None = None  # why the request failed; earlier tokens are kept

    @property
    def is_success(self) -> bool:
        """Whether the whole response arrived."""
        return self.error is None and bool(self.arrivals_s)

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.arrivals_s[0] - self.sent_s

    @property
    def itl_s(self) -> list[float]:
        """Gaps between chunks with tokens."""
        times = self.arrivals_s
        return [after - before for before, after in zip(times, times[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None with fewer than two tokens."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """Time to the last token."""
        return self.arrivals_s[-1] - self.sent_s
