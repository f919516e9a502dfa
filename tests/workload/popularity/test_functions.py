# SPDX-License-Identifier: Apache-2.0
"""Azure Functions traces: dLoRA's mapping by hand, arrivals, and bad files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from moe_lora.workload.popularity.functions import functions_popularity, read_invocations, with_invocations
from moe_lora.workload.popularity.named import parse_popularity
from moe_lora.workload.traces.formats import function_counts
from moe_lora.workload.traces.records import Trace, TraceRequest
from moe_lora.workload.traces.traces import detect_format

HEADER = "HashOwner,HashApp,HashFunction,Trigger,1,2,3"
WIDE = f"{HEADER}\no,p,f,http,0,2,1\no,p,g,timer,5,0,0\no,q,f,http,0,0,1\no,q,idle,http,0,0,0\n"
LONG = (
    "app,func,end_timestamp,duration\n"
    "p,f,10.5,0.5\n"
    "p,g,61.25,50\n"  # started before the row below, ended after it
    "p,f,12.0,0.75\n"
    "q,f,100.0,0\n"
)


def write(folder: Path, text: str) -> Path:
    path = folder / "functions.csv"
    path.write_bytes(text.encode())
    return path


def test_counts_by_function_most_invoked_first(tmp_path: Path) -> None:
    assert list(function_counts(write(tmp_path, WIDE)).items()) == [("p/g", 5), ("p/f", 3), ("q/f", 1)]
    assert list(function_counts(write(tmp_path, LONG)).items()) == [("p/f", 2), ("p/g", 1), ("q/f", 1)]


def test_popularity_adds_up_the_functions_of_an_adapter(tmp_path: Path) -> None:
    path = write(tmp_path, WIDE)
    assert functions_popularity(path, ["x", "y"], 1).probabilities == pytest.approx((6 / 9, 3 / 9))
    assert functions_popularity(path, ["x", "y"], 2).probabilities == pytest.approx((8 / 9, 1 / 9))
    assert parse_popularity(f"functions:2:{path}", ["x", "y"]).at(0) == functions_popularity(
        path, ["x", "y"], 2
    )
    assert parse_popularity(f"functions:{path}", ["x", "y"]).at(0) == functions_popularity(path, ["x", "y"])


def test_counts_by_minute_become_arrivals_within_the_minute(tmp_path: Path) -> None:
    found = read_invocations(write(tmp_path, WIDE), ["g", "f", "q"], seed=3)
    assert found.arrivals_s[0] == 0.0
    assert np.all(np.diff(found.arrivals_s) >= 0)
    assert Counter(found.adapters[i] for i in found.adapter_index) == {"g": 5, "f": 3, "q": 1}
    assert found.arrivals_s[4] < 60  # the five of the first minute come first, all to one adapter
    assert set(found.adapter_index[:5]) == {0}
    again = read_invocations(write(tmp_path, WIDE), ["g", "f", "q"], seed=3)
    assert np.array_equal(found.arrivals_s, again.arrivals_s)
    other = read_invocations(write(tmp_path, WIDE), ["g", "f", "q"], seed=4)
    assert not np.array_equal(found.arrivals_s, other.arrivals_s)


def test_invocations_arrive_when_they_start_in_order(tmp_path: Path) -> None:
    found = read_invocations(write(tmp_path, LONG), ["f", "g", "q"])
    assert found.arrivals_s == pytest.approx([0.0, 1.25, 1.25, 90.0])
    assert [found.adapters[i] for i in found.adapter_index] == ["f", "g", "f", "q"]


def test_rate_thins_the_file_and_duration_cuts_it(tmp_path: Path) -> None:
    rows = "".join(f"o,p,f{i},http,600,600,600\n" for i in range(10))
    path = write(tmp_path, f"{HEADER}\n{rows}")
    found = read_invocations(path, ["x"], request_rate_per_s=20.0)
    assert len(found.arrivals_s) == pytest.approx(20 * 180, rel=0.1)
    with pytest.raises(ValueError, match="18000 invocations in 180 s are fewer"):
        read_invocations(path, ["x"], request_rate_per_s=101.0)
    found = read_invocations(path, ["x"], duration_s=90.0)
    assert len(found.arrivals_s) == pytest.approx(9000, rel=0.1)
    assert found.arrivals_s[-1] < 90.0
    assert len(read_invocations(write(tmp_path, LONG), ["x"], duration_s=50.0).arrivals_s) == 3


def test_more_than_memory_holds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_lora.workload.popularity.functions.MAX_INVOCATIONS", 8)
    with pytest.raises(ValueError, match="9 invocations, more than the 8"):
        read_invocations(write(tmp_path, WIDE), ["x"])


def test_lengths_come_from_another_trace_in_turn(tmp_path: Path) -> None:
    lengths = Trace("s", "sharegpt", (TraceRequest(0, 7, 3, prompt="p"), TraceRequest(0, 9, 1)), {}, False)
    trace = with_invocations(lengths, read_invocations(write(tmp_path, LONG), ["f", "g", "q"]))
    assert [(r.adapter, r.prompt_tokens) for r in trace.requests] == [("f", 7), ("g", 9), ("f", 7), ("q", 9)]
    assert [r.arrival_s for r in trace.requests] == pytest.approx([0.0, 1.25, 1.25, 90.0])
    assert trace.requests[2].prompt == "p"
    assert trace.has_arrival_times


def test_odd_headers_and_line_ends_do_no_harm(tmp_path: Path) -> None:
    text = "\ufeff3, 1,Trigger,HASHFUNCTION,2,HashApp,more\r\n1,0,http,f,2,p,z\r\n\r\n0,5,timer,g,0,p,z\r\n"
    assert function_counts(write(tmp_path, text)) == {"p/g": 5, "p/f": 3}
    text = "duration,extra,func,end_timestamp,app\r\n0.5,9,f,10.5,p\r\n"
    assert function_counts(write(tmp_path, text)) == {"p/f": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{HEADER}\no,p,f,http,0,x,1\n", ["line 2", "column '2'", "'x'"]),
        (f"{HEADER}\no,p,f,http,0,-2,1\n", ["line 2", "column '2'", ">= 0"]),
        (f"{HEADER}\no,p,f,http,0,2\n", ["line 2", "column '3'"]),
        (f"{HEADER}\no,p,f,http,0,0,0\n", ["no invocation"]),
        ("HashOwner,HashApp,HashFunction,Trigger\no,p,f,http\n", ["no minute columns"]),
        (LONG + "q,f,nan,0\n", ["line 6", "'end_timestamp'"]),
        (LONG + "q,f,1,-1\n", ["line 6", "'duration'", ">= 0"]),
        ("a,b\n1,2\n", ["no Azure Functions trace", "end_timestamp"]),
        ("", ["no Azure Functions trace"]),
    ],
)
def test_bad_file_is_refused_with_the_place(tmp_path: Path, text: str, said: list[str]) -> None:
    with pytest.raises(ValueError, match=r"functions\.csv") as caught:
        read_invocations(write(tmp_path, text), ["x"])
    for words in said:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"skewness": 0}, "skewness=0"),
        ({"request_rate_per_s": 0.0}, "request_rate"),
        ({"duration_s": float("nan")}, "duration_s"),
        ({"adapters": []}, "no adapter"),
    ],
)
def test_settings_that_can_not_be_are_refused(tmp_path: Path, settings: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_invocations(write(tmp_path, LONG), **{"adapters": ["x"], **settings})


@pytest.mark.parametrize("text", [WIDE, LONG])
def test_functions_trace_given_as_a_trace_is_told_where_to_go(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="give it with --functions or as --popularity"):
        detect_format(write(tmp_path, text))
