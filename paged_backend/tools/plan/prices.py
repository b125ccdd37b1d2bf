"""Prices of GPUs, and the resulting cost of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paged_backend.tools.plan.options import refuse
from paged_backend.values.validation import shorten

_MOST = 10_000.0  # highest accepted price per hour of one GPU; more must be a typing error


def read_prices(texts: Sequence[str], num_gpus: int) -> list[float | None]:
    """Read a price for each GPU, given one for all, one for each, or none.

    Raises:
        ConfigError: the number of prices is wrong, or a price is outside its range.
    """
    prices = [_price(text) for text in texts]
    if len(prices) == num_gpus:
        return list(prices)
    if len(prices) > 1:
        raise refuse(
            "price", f"give it once, or once for each of {num_gpus} --gpu, got {len(prices)}"
        )
    return [prices[0] if prices else None] * num_gpus


def cost_per_million(hourly: float | None, tokens_per_s: float) -> float | None:
    """The cost of a million tokens at this rate and an hourly price; None without a price."""
    return None if hourly is None else hourly / 3600 / tokens_per_s * 1e6


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 < price <= _MOST:
        raise refuse(
            "price",
            f"must be money for an hour of one GPU, above 0 up to {_MOST:.0f}, got {shorten(text)}",
        )
    return price
