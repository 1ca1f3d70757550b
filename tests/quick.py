"""What `make test` leaves to `make check`: the first of many values stand for all, and few examples for many."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

__all__ = ["examples", "first"]


def first(n: int, values: Iterable[Any]) -> list[Any]:
    """All values for `pytest.mark.parametrize`, those after the first n with the mark `slow`."""
    every = list(values)
    return [*every[:n], *(pytest.param(value, marks=pytest.mark.slow) for value in every[n:])]


def examples(n: int) -> int:
    """How many examples a search tries: n, or as few as the profile of hypothesis says."""
    return min(n, settings.default.max_examples) if settings.default else n
