# SPDX-License-Identifier: Apache-2.0
"""The HTML page: whole in itself, and right for one run, several, and odd ones."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from moe_lora.report import ClientTiming, RequestRecord, SloTargets
from moe_lora.report.html import render, write_report
from moe_lora.report.plots import attainment, cdf, in_flight, token_times_s
from moe_lora.report.results import write_json
from moe_lora.report.run_file import read_run, run_result, summary_table, without_arrays
from tests.grids import with_quick


def make_run(label: str, num_requests: int = 12, failed: int = 1, adapters: str = "adapter-") -> dict:
    records = []
    for index in range(num_requests):
        start = index * 0.1
        timing = ClientTiming(
            sent_s=start,
            token_times_s=(start + 0.1, start + 0.15, start + 0.2),
            end_s=start + 0.2,
            num_output_tokens=3,
            decode_ttft_ms=20.0,
        )
        adapter = f"{adapters}{index % 3}" if index % 4 else None
        shared = {"adapter": adapter, "arrival_s": start, "sent_s": start, "input_tokens": 5}
        records.append(
            RequestRecord(**shared, error="HTTP 503: <b>busy</b>")
            if index < failed
            else RequestRecord(**shared, timing=timing, exact=True)
        )
    return run_result(records, 2.0, SloTargets(), label=label, config={"zipf": 1.2}, env={"python": "3"})


class References(HTMLParser):
    """Every src and href, and the tags that stay open."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, but not drawn."""
    monkeypatch.setattr("moe_lora.report.html.png", lambda figure: "")


@pytest.mark.parametrize("labels", with_quick([["one"], ["ours", "peer"]], [["ours", "peer"]]))
def test_page_refers_to_nothing_outside_itself(tmp_path: Path, labels: list[str]) -> None:
    write_report(tmp_path / "r.html", [make_run(label) for label in labels], "Load & test")
    page = (tmp_path / "r.html").read_text()
    references = References()
    references.feed(page)
    assert references.open == []
    assert len(references.found) == 4
    assert all(reference.startswith("data:image/png;base64,") for reference in references.found)
    without_images = re.sub(r"base64,[^\"]*", "", page)
    assert "http:" not in without_images
    assert "https:" not in without_images
    assert "url(" not in without_images
    for label in labels:
        assert f"<th>{label}</th>" in page


def test_page_says_that_a_run_was_stopped(no_pictures: None) -> None:
    run = make_run("x")
    assert "stopped by the user" not in render([run], "t")
    assert "2 s, stopped by the user" in render([{**run, "stopped_early": True}], "t")


def test_text_from_outside_is_escaped(no_pictures: None) -> None:
    page = render([make_run("<script>alert(1)</script>")], "t")
    assert "<script" not in page
    assert "&lt;b&gt;busy" in page


@pytest.mark.parametrize("run", [make_run("all failed", failed=12), make_run("nothing", num_requests=0)])
def test_page_is_made_even_if_nothing_was_completed(run: dict) -> None:
    assert "All numbers" in render([run], "t")


def test_dollar_signs_in_names_are_no_formulas(tmp_path: Path) -> None:
    runs = [make_run(f"$\\frac$ {name}", adapters="$^_$ ") for name in ("a", "b")]
    write_report(tmp_path / "r.html", runs, "Load test")
    assert (tmp_path / "r.html").read_text().count("data:image/png") == 4


def test_report_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one run"):
        write_report(tmp_path / "r.html", [])


def test_table_has_a_column_for_each_run() -> None:
    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary_table([make_run("ours"), make_run("peer", failed=2)]))
    text = console.export_text()
    assert "ours" in text
    assert "peer" in text
    assert re.search(r"Requests failed\W+1\W+2\W", text)
    assert "interrupted" not in text


def test_run_file_comes_back_as_written(tmp_path: Path) -> None:
    run = make_run("x")
    write_json(tmp_path / "run.json", run)
    assert read_run(tmp_path / "run.json") == run
    assert "ttfts" not in without_arrays(run)
    assert without_arrays(run)["p95_ttft_ms"] == run["p95_ttft_ms"]


def test_file_that_is_no_run_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"label": "x"})
    with pytest.raises(ValueError, match="no 'duration' in it"):
        read_run(tmp_path / "x.json")
    with pytest.raises(ValueError, match="readable"):
        read_run(tmp_path / "absent.json")


def test_arrays_have_one_entry_a_request_and_null_for_the_failed() -> None:
    run = make_run("x")
    assert run["ttfts"][0] is None
    assert run["ttfts"][1] == pytest.approx(0.1)
    assert run["errors"][:2] == ["HTTP 503: <b>busy</b>", ""]
    assert run["itls"][1] == pytest.approx([0.05, 0.05])
    assert run["error_counts"] == {"HTTP 503: <b>busy</b>": 1}


def test_series_agree_with_the_requests() -> None:
    run = make_run("x")
    assert len(token_times_s(run)) == 11 * 3
    assert in_flight(run, np.array([0.25, 1.25, 5.0])).tolist() == [2, 1, 0]
    assert sum(count for _, count, _ in attainment(run)) == 12
    assert [share for name, _, share in attainment(run) if name == "(base)"] == [pytest.approx(2 / 3)]
    values, shares = cdf(np.arange(5000.0), max_points=100)
    assert len(values) == 100
    assert (values[0], shares[-1]) == (0.0, 1.0)


def test_the_top_names_model_machine_load_and_terms(no_pictures):
    config = {"model": "base", "trace": "/data/azure.csv", "request_rate": 4.0, "emulates": "DBRX on 12 GPUs"}
    env = {"cpu_model": "EPYC", "cpu_cores": 2, "gpus": ["H100"], "git_commit": 40 * "a", "git_dirty": True}
    page = render([{**make_run("first"), "config": config, "env": env}], "t", ["A note."])
    top = page[: page.index("How long requests waited")]
    for text in ("Model: base", "Emulated: DBRX", "trace azure.csv, 4 requests/s", "EPYC, 2 cores, H100"):
        assert text in top
    assert "commit aaaaaaaaaa with changes" in top
    assert "TTFT 0.25 s, TPOT 0.1 s" in top
    assert "TTFT: from sending a request" in top
    assert "A note." in top
    assert "/data/" not in top
