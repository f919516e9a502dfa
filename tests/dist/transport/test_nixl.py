"""What only the NIXL transport can get wrong: its notices."""

from __future__ import annotations

import struct

import pytest

from moe_lora.dist.transport import make_transport

from .peers import TIMEOUT_S, pattern

pytest.importorskip("nixl", reason="nixl is not installed; pip install 'moe-lora[nixl]'")


def test_notices_that_fit_no_signal_change_nothing() -> None:
    with make_transport("nixl", name="here") as here, make_transport("nixl", name="there") as there:
        window = there.alloc("theirs", 100, 1)
        remote = here.attach(window.descriptor())
        for notice in (b"", b"x", struct.pack("<qqQ", 0, 1, 7), struct.pack("<qqQ", 0, -1, 7)):
            here._agent.send_notif(remote.agent, notice)
        here.put_signal(remote, 0, pattern(100, 1), 0, 1)
        here.fence(remote)
        assert there.signal_wait_until(window, 0, 1, TIMEOUT_S) == 1
        assert window.bytes.equal(pattern(100, 1))
