# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench.lora_server.bench_overlap import shares
from moe_lora.dist.deltas.session import ExchangeTimes


def test_shares_of_hand_made_exchanges():
    hidden = ExchangeTimes(
        0, 3, sent_ns=0, started_ns=10_000, finished_ns=60_000, asked_ns=90_000, taken_ns=91_000
    )
    waited = ExchangeTimes(
        0, 4, sent_ns=0, started_ns=10_000, finished_ns=60_000, asked_ns=40_000, taken_ns=70_000
    )
    found = shares([hidden, waited])
    assert found["num_requests_to_server"] == 2
    assert found["server_compute_us"] == 50
    assert found["hidden_share"] == 1 - 30 / (60 + 70)


@pytest.mark.slow
def test_tiny_run_measures_and_traces(tmp_path):
    out, trace = tmp_path / "out.jsonl", tmp_path / "trace.json"
    command = [sys.executable, "-m", "bench.lora_server.bench_overlap", "--tiny", "--num-requests", "2"]
    subprocess.run([*command, "--out", str(out), "--trace", str(trace)], check=True)
    [record] = [json.loads(line) for line in out.read_text().splitlines()]
    assert record["kind"] == "measured"
    assert record["result"]["num_requests_to_server"] > 0
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert "moe_lora::lora_linear" in names
    assert any(name.startswith("deltas layer") for name in names)
