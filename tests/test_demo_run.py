# SPDX-License-Identifier: Apache-2.0
"""What `make demo` says at its end: true to what came out, whichever way that was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from demo.run import ALL_FIT, SHORT_OF_MEMORY, faster, verdict

ROOT = Path(__file__).resolve().parent.parent


def run(p95_ttft_ms):
    return {
        "p95_ttft_ms": p95_ttft_ms,
        "mean_tpot_ms": 10.0,
        "slo_attainment": 1.0,
        "exact_answers": 0.99,
    }


@pytest.mark.parametrize(("server_ms", "name"), [(200, "coupled"), (105, "neither"), (50, "server")])
def test_the_faster_one_is_named_whichever_it_is(server_ms, name):
    assert faster(run(100), run(server_ms)) == name
    _, fit, short = verdict([run(100), run(server_ms), run(100), run(server_ms)])
    assert fit.endswith(ALL_FIT[name])
    assert short.endswith(SHORT_OF_MEMORY[name])
    assert "Emulated" in short
    assert "Emulated" not in fit


@pytest.mark.slow
def test_the_demo_answers_compares_and_names_its_report(tmp_path):
    command = [sys.executable, "-m", "demo.run", "--duration-s", "2", "--output-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "reverse: hello= -> olleh" in done.stdout
    report = tmp_path / "report.html"
    assert f"Report: {report.as_uri()}" in done.stdout
    assert "nanobind" not in done.stdout + done.stderr
    page = report.read_text()
    assert "emulated" in page
    assert "hello= -&gt; olleh" in page
