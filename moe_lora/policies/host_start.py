"""Prompts that host workers compute while their adapters load: how many tokens of each in a step."""

from __future__ import annotations

from collections.abc import Sequence


def fair_shares(wanted: Sequence[int], total: int) -> list[int]:
    """A division of `total` tokens: nobody gets more than it wants, and who gets less than it wants has, but
    for one token of rounding, as much as anybody (max-min fairness).  So a long prompt does not keep the
    shorter ones behind it waiting.  Of equal ones the first has what rounding leaves.
    """
    shares = [0] * len(wanted)
    for place, index in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        shares[index] = min(wanted[index], -(-total // (len(wanted) - place)))
        total -= shares[index]
    return shares
