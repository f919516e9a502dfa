# SPDX-License-Identifier: Apache-2.0
"""The highest rate with good service."""

from __future__ import annotations

import math
from collections.abc import Callable


def highest_rate(is_met: Callable[[float], bool], guess: float, *, step: float, precision: float) -> float:
    """A rate with `is_met`, but not at 1 + precision times the rate.

    Bisection, after a bracket in steps of a factor from the guess.
    """
    low, high = (guess, guess * step) if is_met(guess) else (guess / step, guess)
    while low == guess and is_met(high):
        low, high = high, high * step
        guess = low
    while high <= guess and not is_met(low):
        low, high = low / step, low
    while high / low > 1 + precision:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low
