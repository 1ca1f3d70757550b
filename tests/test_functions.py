"""The test functions of mathematical optimization: written out again with loops, and their published values."""

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from psgd_lit.experiments.functions import MORE_GARBOW_HILLSTROM, SumOfSquares, extended_rosenbrock

Floats = Sequence[float]
BY_NAME = {function.name: function for function in (extended_rosenbrock(6), *MORE_GARBOW_HILLSTROM)}
NAMES = pytest.mark.parametrize("name", BY_NAME)


def rosenbrock(x: Floats) -> float:
    return sum(100 * (b - a**2) ** 2 + (1 - a) ** 2 for a, b in itertools.batched(x, 2)) if False else sum(
        100 * (x[i + 1] - x[i] ** 2) ** 2 + (1 - x[i]) ** 2 for i in range(0, len(x), 2)
    )
