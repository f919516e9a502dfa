# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from bench.cluster.bench_elastic import PHASES, figures, write_plot


def test_a_request_counts_where_it_arrives_and_a_failure_has_no_ttft(tmp_path):
    phases = [(name, float(number), number + 1.0) for number, name in enumerate(PHASES)]
    answers = [(number + 0.5, 0.25 * (1 + number), number + 9.0, 200) for number in range(len(PHASES))]
    answers.append((1.75, None, 2.0, 503))
    found = figures(answers, phases)
    assert [one["requests"] for one in found.values()] == [1, 2, 1, 1, 1, 1, 1]
    assert [one["failed"] for one in found.values()] == [0, 1, 0, 0, 0, 0, 0]
    assert [one["ttft_p95_s"] for one in found.values()] == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]
    write_plot({"phases": found, "answers": answers}, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size
