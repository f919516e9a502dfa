# SPDX-License-Identifier: Apache-2.0
"""What only the NIXL transport can get wrong: its notices."""

from __future__ import annotations

import struct
import threading
from typing import Any

import pytest
import torch

from moe_lora.core.errors import PeerGoneError
from moe_lora.dist.transport import make_transport
from moe_lora.dist.transport.contract import Descriptor
from moe_lora.dist.transport.nixl import NixlRemoteWindow, NixlTransfers, Transfer

from .peers import TIMEOUT_S, pattern


class Agent:
    """NixlTransfers end when the test says so."""

    def __init__(self) -> None:
        self.states = {"large": "PROC", "small": "PROC"}
        self.sent: list[bytes] = []

    def check_xfer_state(self, handle: str) -> str:
        return self.states[handle]

    def send_notif(self, peer: str, notice: bytes) -> None:
        self.sent.append(notice)

    def release_xfer_handle(self, handle: str) -> None:
        del self.states[handle]

    def deregister_memory(self, registered: object) -> None:
        assert registered == "memory"


def under_way() -> tuple[Agent, NixlTransfers, NixlRemoteWindow]:
    """A large write, a small one, and a signal alone, all pending."""
    agent: Any = Agent()
    medium = {"agent": "there", "address": 0, "window": 0, "tag": 0}
    found = Descriptor(kind="nixl", peer="there", label="w", num_bytes=9, num_signals=1, medium=medium)
    remote = NixlRemoteWindow(found, transport=None)  # type: ignore[arg-type]
    for handle in ("large", "small"):
        remote.pending.append(
            Transfer(handle=handle, registered="memory", tensor=torch.zeros(1), notice=handle.encode())
        )
    remote.pending.append(Transfer(notice=b"alone"))
    return agent, NixlTransfers(agent, (RuntimeError,), threading.RLock(), lambda: None), remote


def test_no_notice_overtakes_a_write_before_it() -> None:
    agent, transfers, remote = under_way()
    agent.states["small"] = "DONE"
    assert not transfers.ended(remote.pending, remote)
    assert agent.sent == []
    agent.states["large"] = "DONE"
    assert transfers.ended(remote.pending, remote)
    assert agent.sent == [b"large", b"small", b"alone"]
    assert agent.states == {}


def test_a_write_that_fails_takes_the_notices_behind_it_along() -> None:
    agent, transfers, remote = under_way()
    agent.states.update(large="ERR", small="DONE")
    with pytest.raises(PeerGoneError, match="'w' of 'there'"):
        transfers.ended(remote.pending, remote)
    assert (agent.sent, agent.states, remote.pending) == ([], {}, [])
    assert not remote.alive()


def test_notices_that_fit_no_signal_change_nothing() -> None:
    pytest.importorskip("nixl", reason="nixl is not installed; pip install 'moe-lora[nixl]'")
    with make_transport("nixl", name="here") as here, make_transport("nixl", name="there") as there:
        window = there.alloc("theirs", 100, 1)
        remote = here.attach(window.descriptor())
        for notice in (b"", b"x", struct.pack("<qqQ", 0, 1, 7), struct.pack("<qqQ", 0, -1, 7)):
            here.agent.send_notif(remote.agent, notice)
        here.put_signal(remote, 0, pattern(100, 1), 0, 1)
        here.fence(remote)
        assert there.signal_wait_until(window, 0, 1, TIMEOUT_S) == 1
        assert window.bytes.equal(pattern(100, 1))
