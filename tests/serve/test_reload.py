"""Settings that are read again, without the signal."""

from __future__ import annotations

import asyncio
import logging
import os
import pty
import signal
import time
from dataclasses import replace

import pytest

from moe_lora.config import EngineConfig, FrontEndConfig, LimitsConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.processes import set_log_level
from moe_lora.serve.limits import Limits
from moe_lora.serve.reload import Reload, on_hang_up


class Written:
    """What the file says now."""

    def __init__(self) -> None:
        self.now = ClusterConfig(engine=EngineConfig(model_dir="base"), served_model_name="base")
        self.error: Exception | None = None

    def write(self, **front_end) -> None:
        self.now = replace(self.now, front_end=FrontEndConfig(**front_end))

    def read(self) -> ClusterConfig:
        if self.error is not None:
            raise self.error
        return self.now


@pytest.fixture
def written() -> Written:
    return Written()


@pytest.fixture(autouse=True)
def level():
    before = logging.getLogger("moe_lora").level
    yield
    logging.getLogger("moe_lora").setLevel(before)


def reloaded(reload: Reload, limits: Limits) -> None:
    async def run() -> None:
        reload.begin(limits)
        while reload._tasks:
            await asyncio.sleep(0)

    asyncio.run(run())


def test_limits_change_and_what_was_taken_stays_taken(written):
    reload, limits = Reload(written.read), Limits(LimitsConfig())
    limits.queue.take("a", 5000)
    written.write(max_queued_tokens_per_client=6000, max_body_bytes=2048, log_level="error")
    reloaded(reload, limits)
    assert limits.config.max_body_bytes == 2048
    assert limits.queue.exceeded("a", 1001) == "client"
    assert limits.queue.exceeded("a", 1000) is None
    assert logging.getLogger("moe_lora").level == logging.ERROR


def test_a_file_that_is_wrong_changes_nothing_and_says_so(written, caplog):
    reload, limits = Reload(written.read), Limits(LimitsConfig())
    written.error = ConfigError("max_choices must be a number")
    reloaded(reload, limits)
    assert limits.config == LimitsConfig()
    assert "stay as they are: max_choices must be a number" in caplog.text


def test_what_needs_a_restart_is_named_as_such_and_not_taken_over(written, caplog):
    reload, limits = Reload(written.read), Limits(LimitsConfig())
    written.write(port=99, idle_timeout_s=1.0)
    reloaded(reload, limits)
    assert limits.config.idle_timeout_s == LimitsConfig().idle_timeout_s
    assert "restart it for those" in caplog.text


def test_a_log_level_shows_what_is_at_least_that_important():
    set_log_level("warning")
    shown = logging.getLogger("moe_lora.serve.server")
    assert not shown.isEnabledFor(logging.INFO)
    assert shown.isEnabledFor(logging.WARNING)


def test_a_hang_up_ends_the_server_only_when_its_terminal_is_gone(tmp_path):
    """In a process of its own that has a terminal, which is closed on it."""
    said = tmp_path / "said"
    pid, terminal = pty.fork()
    if not pid:  # no fixture or output of pytest may run here
        try:
            hang_up = on_hang_up(lambda: said.write_text("stop"), lambda: said.write_text("reload"))
            signals: list[int] = []
            signal.signal(signal.SIGHUP, lambda number, _: signals.append(number))
            hang_up()
            os.write(1, said.read_text().encode())
            while not signals:
                time.sleep(0.001)
            hang_up()
        finally:
            os._exit(0)
    assert os.read(terminal, 100) == b"reload"
    os.close(terminal)
    os.waitpid(pid, 0)
    assert said.read_text() == "stop"
