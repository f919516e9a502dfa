# SPDX-License-Identifier: Apache-2.0
"""Covering arrays: few combinations in which every pair of values of two factors occurs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product

Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def all_rows(factors: Mapping[str, Sequence[str]], is_possible: Callable[[Row], bool]) -> list[Row]:
    """Every possible combination of one value of each factor."""
    rows = (dict(zip(factors, values, strict=True)) for values in product(*factors.values()))
    return [row for row in rows if is_possible(row)]


def pairs_of(row: Row) -> set[Pair]:
    """Pairs of (factor, value) that the row covers."""
    return set(combinations(row.items(), 2))


def covering_rows(factors: Mapping[str, Sequence[str]], is_possible: Callable[[Row], bool]) -> list[Row]:
    """Rows such that every pair that some possible row covers is covered.

    Greedy: the row that covers most of the open pairs comes next, the first among equals.
    """
    rows = all_rows(factors, is_possible)
    pairs = [pairs_of(row) for row in rows]
    open_pairs: set[Pair] = set().union(*pairs)
    chosen = []
    while open_pairs:
        best = max(range(len(rows)), key=lambda i: len(pairs[i] & open_pairs))
        chosen.append(rows[best])
        open_pairs -= pairs[best]
    return chosen


def rows_of_all_values(rows: Sequence[Row]) -> list[Row]:
    """Few of the rows in which every value of every factor occurs.  Greedy, as `covering_rows`."""
    open_values = {value for row in rows for value in row.items()}
    chosen = []
    while open_values:
        chosen.append(max(rows, key=lambda row: len(open_values & row.items())))
        open_values -= chosen[-1].items()
    return chosen
