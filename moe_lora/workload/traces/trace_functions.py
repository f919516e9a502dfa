"""Readers of the Azure Functions traces, 2019 and 2021.  They hold arrivals and identities, no lengths.

Source: Microsoft's AzurePublicDataset, AzureFunctionsDataset2019.md, AzureFunctionsInvocationTrace2021.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .records import RowReader, open_text
from .csv_formats import csv_rows, table

COLUMNS_2019 = ("HashApp", "HashFunction")  # HashOwner and Trigger add nothing; minutes are columns 1 … 1440
COLUMNS_2021 = ("app", "func", "end_timestamp", "duration")
_NEEDED = f"{','.join(COLUMNS_2019)},1,2,… (2019) or {','.join(COLUMNS_2021)} (2021)"


def is_2019(path: str | Path) -> bool:
    """Whether the file counts by minute (2019) or lists invocations (2021); ValueError if neither."""
    with open_text(path, "functions trace") as lines:
        header, _ = table(lines, RowReader(str(path)))
    if {column.lower() for column in COLUMNS_2019} <= set(header):
        return True
    if set(COLUMNS_2021) <= set(header):
        return False
    raise ValueError(f"{path}, line 1: no Azure Functions trace; needed: {_NEEDED}")


def rows_2019(path: str | Path) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Each row's function and its invocations by minute."""
    reader = RowReader(str(path))
    with open_text(path, "functions trace") as lines:
        header, rows = table(lines, reader)
        names = [header.index(column.lower()) for column in COLUMNS_2019]
        columns = {int(name): i for i, name in enumerate(header) if name.isdecimal() and len(name) < 6}
        if not columns or min(columns) < 1:
            raise ValueError(f"{path}, line 1: no minute columns; needed: {_NEEDED}")
        for row in rows:
            if len(row) < len(header):
                raise reader.error(header[len(row)], f"only {len(row)} columns", f"{len(header)} columns")
            minutes = np.zeros(max(columns), dtype=np.int64)
            for minute, i in columns.items():
                if row[i] != "0":
                    minutes[minute - 1] = reader.count(header[i], row[i])
            yield "/".join(row[i].strip() for i in names), minutes


def rows_2021(path: str | Path) -> Iterator[tuple[str, float]]:
    """Each invocation's function and start."""
    reader = RowReader(str(path))
    with open_text(path, "functions trace") as lines:
        for app, func, end, duration in csv_rows(lines, reader, COLUMNS_2021):
            duration_s = reader.time("duration", duration, "seconds")
            yield f"{app}/{func}", reader.number("end_timestamp", end, "seconds") - duration_s


def function_counts(path: str | Path) -> dict[str, int]:
    """Invocations by function ("app/function"), most invoked first.

    Raises ValueError naming file, line and column for a bad value, and if nothing is invoked.
    """
    counts: Counter[str] = Counter()
    if is_2019(path):
        for function, minutes in rows_2019(path):
            counts[function] += int(minutes.sum())
    else:
        counts.update(function for function, _ in rows_2021(path))
    found = {name: count for name, count in counts.items() if count}
    if not found:
        raise ValueError(f"{path}: no invocation in the trace")
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))
