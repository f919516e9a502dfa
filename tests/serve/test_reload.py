# SPDX-License-Identifier: Apache-2.0
"""Settings that are read again, without the signal."""

from __future__ import annotations

import asyncio
import logging
import os
import pty
import signal
import ssl
import textwrap
import time
from dataclasses import replace

import pytest

from moe_lora.config import EngineConfig, FrontEndConfig, LimitsConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.processes import set_log_level
from moe_lora.serve.limits import Limits
from moe_lora.serve.reload import Reload, hang_ups_ignored, on_hang_up
from tests.forked_programs import start_program
from tests.patience import PATIENCE_S

from .live_server import wait_until
from .served_tenants import make_certificate

SERVING = """
    import asyncio, logging, sys
    from moe_lora.serve.reload import Reload
    from moe_lora.serve.server import bound, serve_forever
    from tests.serve.conftest import frontend_of, scripted
    from tests.small_tokenizers import characters, wrapped

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    tokenizer = wrapped(characters())
    cert, key = sys.argv[1:]
    frontend = frontend_of(scripted(tokenizer), tokenizer, tls_cert=cert, tls_key=key)
    reload = Reload(lambda: frontend.cluster)
    with bound(frontend.config) as socks:
        asyncio.run(serve_forever(frontend, socks, reload=reload))
"""


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


def test_a_new_certificate_is_shown_from_a_hang_up_on_and_half_of_one_is_not(tmp_path):
    (tmp_path / "new").mkdir()
    (cert, key), (new_cert, new_key) = make_certificate(tmp_path), make_certificate(tmp_path / "new")
    read, write = os.pipe()
    output = os.fdopen(read)
    with os.fdopen(write, "w") as file:
        process = start_program(textwrap.dedent(SERVING), str(cert), str(key), stdout=file, stderr=file)

    def said(words: str) -> str:
        for line in output:
            if words in line:
                return line
        raise AssertionError(f"it ended before it said {words!r}")

    def shown() -> bytes:
        return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", port)))

    def in_file() -> bytes:
        return ssl.PEM_cert_to_DER_cert(cert.read_text())

    try:
        port = int(said("Serving base at https://").rpartition(":")[2])
        first = in_file()
        assert shown() == first
        new_cert.replace(cert)
        process.send_signal(signal.SIGHUP)
        said("can't be read again and stays")
        assert shown() == first
        new_key.replace(key)
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: shown() == in_file(), "the new certificate is shown")
        assert in_file() != first
        process.send_signal(signal.SIGTERM)
        output.read()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        output.close()


def test_hang_ups_do_nothing_while_a_server_starts():
    before = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with hang_ups_ignored():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
