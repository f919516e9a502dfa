# SPDX-License-Identifier: Apache-2.0
"""Whatever is done to a trace's bytes, reading it ends well or with ValueError that names the file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_lora.workload.popularity.functions import read_invocations
from moe_lora.workload.popularity.popularity import read_counts
from moe_lora.workload.statistics import trace_statistics
from moe_lora.workload.traces.traces import iter_trace
from tests.workload.popularity.test_functions import LONG, WIDE

from .test_traces import SAMPLES

INTERESTING = (
    b"",
    b"\x00",
    b"\xff",
    b'"',
    b"\n",
    b"\r",
    b",",
    b"-1",
    b"nan",
    b"inf",
    b"1e308",
    b"1e400",
    b"9" * 400,
    b"9" * 5000,
    b"[" * 3000,
    b"{",
    b"}",
    b"]",
    b"null",
    b"true",
    b"\\ud800",
    "²٣\u2028\ufeff".encode(),
    b" ",
    b"0",
    b"0001-01-01 00:00:00+23:59",
)


def mangle(text: str, rng: random.Random, bits: list[bytes]) -> bytes:
    """The bytes with pieces cut out, doubled, moved, and odd ones put in."""
    data = text.encode()
    for bit in bits:
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice((0, 0, 1, 2, 5, 40)))
        piece = rng.choice((bit, bit, data[start:end] * 2, data[: rng.randrange(60)]))
        data = data[:start] + piece + data[end:]
    return data


MANGLED = given(
    rng=st.randoms(use_true_random=False),
    bits=st.lists(st.sampled_from(INTERESTING) | st.binary(max_size=4), min_size=1, max_size=5),
)


def only_value_error(path: Path, read) -> None:  # type: ignore[no-untyped-def]
    try:
        read()
    except ValueError as error:
        said = str(error)
    else:
        return
    assert path.name in said


@pytest.mark.parametrize("name", SAMPLES)
@settings(deadline=None, max_examples=100)
@MANGLED
def test_mangled_trace_raises_nothing_but_value_error(
    tmp_path_factory: pytest.TempPathFactory, name: str, rng: random.Random, bits: list[bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "mangled.trace"
    path.write_bytes(mangle(SAMPLES[name], rng, bits))
    only_value_error(path, lambda: list(iter_trace(path, name)))
    only_value_error(path, lambda: trace_statistics(path))


@pytest.mark.parametrize("text", [WIDE, LONG])
@settings(deadline=None, max_examples=100)
@MANGLED
def test_mangled_functions_trace_raises_nothing_but_value_error(
    tmp_path_factory: pytest.TempPathFactory, text: str, rng: random.Random, bits: list[bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "mangled.functions"
    path.write_bytes(mangle(text, rng, bits))
    for rate in (None, 0.01):
        only_value_error(path, lambda: read_invocations(path, ["x", "y"], request_rate_per_s=rate))  # noqa: B023


@pytest.mark.parametrize("text", ['{"x": 3, "y": 1}', "adapter,count\nx,3\ny,1\n"])
@settings(deadline=None, max_examples=100)
@MANGLED
def test_mangled_counts_raise_nothing_but_value_error(
    tmp_path_factory: pytest.TempPathFactory, text: str, rng: random.Random, bits: list[bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "mangled.counts"
    path.write_bytes(mangle(text, rng, bits))
    only_value_error(path, lambda: read_counts(path))


@settings(deadline=None, max_examples=100)
@given(
    name=st.sampled_from(sorted(SAMPLES)),
    line=st.text(max_size=60) | st.sampled_from(["[]", "{}", "null", "[[1]]", '{"arrival_s": []}', ",,,"]),
    place=st.integers(0, 4),
)
@example(name="sharegpt", line="[1, 2]", place=0)
def test_odd_line_raises_nothing_but_value_error(
    tmp_path_factory: pytest.TempPathFactory, name: str, line: str, place: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "odd.trace"
    lines = SAMPLES[name].splitlines(keepends=True)
    lines.insert(place, line + "\n")
    path.write_text("".join(lines), encoding="utf-8", errors="surrogatepass")
    only_value_error(path, lambda: list(iter_trace(path, name)))
    only_value_error(path, lambda: trace_statistics(path))
