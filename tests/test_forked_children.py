# SPDX-License-Identifier: Apache-2.0
import os
import signal
import sys
from pathlib import Path

import pytest

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
