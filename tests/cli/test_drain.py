# SPDX-License-Identifier: Apache-2.0
"""`moe-lora drain` says that an instance has no requests only of one that has none."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner, Result

from moe_lora.cli import administrator
from moe_lora.cli.main import main


def card(num_running: int, *, silent: bool = False) -> dict[str, Any]:
    return {"id": "one", "silent": silent, "requests_running": num_running, "requests_waiting": 0}


def drained(monkeypatch: pytest.MonkeyPatch, cards: list[dict[str, Any] | None], wait_s: float) -> Result:
    """The command's end where the server shows these, one at a time; None: nothing of that name."""

    def call(*_: object) -> dict[str, Any]:
        found = cards.pop(0)
        return {"data": [] if found is None else [found]}

    monkeypatch.setattr(administrator, "_LOOK_S", 0.0)
    monkeypatch.setattr(administrator, "call_instance", lambda *_: cards.pop(0))
    monkeypatch.setattr(administrator, "call", call)
    return CliRunner().invoke(main, ["drain", "one", "--wait-s", str(wait_s)])


def test_one_that_is_silent_is_waited_for(monkeypatch):
    cards: list[dict[str, Any] | None] = [card(2), card(0, silent=True), card(1), card(0)]
    done = drained(monkeypatch, cards, 60)
    assert (done.exit_code, done.output) == (0, "one is drained and has no requests\n")
    assert not cards


def test_one_that_stays_silent_is_an_error_and_so_is_one_that_has_gone(monkeypatch):
    done = drained(monkeypatch, [card(0, silent=True)], 0)
    assert done.exit_code
    assert "does not get on after --wait-s 0" in done.output
    done = drained(monkeypatch, [card(1), None], 60)
    assert done.exit_code
    assert "does not list it any more" in done.output
