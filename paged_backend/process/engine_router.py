"""The choice among several engines of a model, with the gateway's policy."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

from paged_client.routing import MAX_PIECES, PIECE_TOKENS, PrefixRouter, prefix_hashes

from paged_backend.values.request import Request

_MAX_TOKENS = MAX_PIECES * PIECE_TOKENS  # that are looked at


class EngineRouter:
    """Chooses the engine that most likely has the longest beginning of a prompt in its cache.

    An engine is left if it has many more open requests of this front end than another one, see
    :class:`paged_client.routing.PrefixRouter`. One thread at a time may use it.

    Args:
        num_engines: number of the model's engines.
    """

    def __init__(self, num_engines: int) -> None:
        self._router = PrefixRouter()
        self._num_starts = [0] * num_engines

    @staticmethod
    def route(request: Request) -> list[bytes]:
        """Return a hash of each full piece of a prompt's beginning and of all tokens before it.

        Any thread may call it.
        """
        start = array("i", request.prompt_token_ids[:_MAX_TOKENS])
        adapter = "" if request.lora is None else request.lora.lora_name
        return prefix_hashes(adapter, request.cache_salt, start)

    def choose(
        self, route: Sequence[bytes], engines: Collection[int], num_open: Sequence[int]
    ) -> int:
        """Choose one of some engines, and remember the choice.

        Args:
            route: the result of `route`.
            engines: numbers of the engines that can take the request; at least one.
            num_open: number of open requests of each engine of the model.
        """
        numbers = {self._name(number): number for number in engines}
        loads = {name: num_open[number] for name, number in numbers.items()}
        return numbers[self._router.choose(route, loads).server]

    def forget(self, engine: int) -> None:
        """Note that an engine has ended: the next one has an empty cache."""
        name = self._name(engine)
        self._num_starts[engine] += 1
        self._router.rename(name, self._name(engine))

    def _name(self, engine: int) -> str:
        return f"{engine}.{self._num_starts[engine]}"
