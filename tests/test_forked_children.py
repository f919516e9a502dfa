# SPDX-License-Identifier: Apache-2.0
import asyncio
import os
import signal
import sys
from pathlib import Path

import anyio
import pytest
from anyio import to_process

from moe_lora.core.processes import start_child
from tests.patience import PATIENCE_S

from .forked_children import ForkedChild

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere children are started anew")
WORKER = "moe_lora.dist.host_workers.worker"


def test_forked_child_is_a_child_as_any_other():
    child, connection = start_child(WORKER, num_threads=1)
    process = child.process
    assert isinstance(process, ForkedChild)
    facts = Path(f"/proc/{process.pid}")
    command = (facts / "cmdline").read_bytes().strip(b"\0").split(b"\0")
    assert command[1:3] == [b"-m", WORKER.encode()]
    assert int((facts / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
    assert os.getsid(process.pid) == process.pid
    assert not child.ended.done()
    process.kill()
    assert child.ended.result(PATIENCE_S) == -signal.SIGKILL
    with pytest.raises((EOFError, OSError)):
        connection.recv_bytes()


def test_forked_child_ends_with_the_exit_status_of_its_module():
    child, connection = start_child("moe_lora.no_such_module", num_threads=1)
    connection.close()
    assert child.ended.result(PATIENCE_S) == 1


def test_the_process_of_calls_is_forked():
    """It has the modules of a server, answers, raises, and ends with its event loop."""

    async def calls():
        pid = await to_process.run_sync(os.getpid)
        assert await to_process.run_sync(_is_loaded, "torch")
        assert len(await to_process.run_sync(bytes, 1 << 20)) == 1 << 20
        with pytest.raises(ZeroDivisionError):
            await to_process.run_sync(divmod, 1, 0)
        command = Path(f"/proc/{pid}/cmdline").read_bytes().strip(b"\0").split(b"\0")
        assert command[1:] == [b"-u", b"-m", b"anyio.to_process"]
        return pid

    pid = anyio.run(calls)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_other_commands_of_asyncio_start_anew():
    async def run():
        process = await asyncio.create_subprocess_exec("echo", "one", stdout=asyncio.subprocess.PIPE)
        return (await process.communicate())[0]

    assert asyncio.run(run()) == b"one\n"


def _is_loaded(name):
    return name in sys.modules
