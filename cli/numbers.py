# SPDX-License-Identifier: Apache-2.0
"""Options that are lists of whole numbers: `--ranks 8,16,32`."""

from __future__ import annotations

from typing import Any

import click


class WholeNumbers(click.ParamType):
    """Whole numbers between least and most, separated by commas; sorted, each once."""

    name = "n,n,..."

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = sorted({int(word) for word in value.split(",")})
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers, as 8,16,32", param, ctx)
        if numbers[0] < self._least or numbers[-1] > self._most:
            self.fail(f"{value!r} has a number outside {self._least} to {self._most}", param, ctx)
        return tuple(numbers)
