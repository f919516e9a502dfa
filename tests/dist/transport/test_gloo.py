# SPDX-License-Identifier: Apache-2.0
"""What only the gloo transport can get wrong: its links."""

from __future__ import annotations

import errno
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
import torch

from moe_lora.core.errors import PeerGoneError, PeerUnreachableError
from moe_lora.dist.transport import RemoteWindow, Transport, make_transport
from moe_lora.dist.transport.gloo_link import Op
from tests.patience import PATIENCE_S

from .peers import TIMEOUT_S, Peer, pattern

NUM_PEERS = 8


def test_threads_that_attach_to_different_peers_keep_each_others_links() -> None:
    with ExitStack() as stack, ThreadPoolExecutor(NUM_PEERS) as threads:
        here = stack.enter_context(make_transport("gloo", name="here"))
        peers = [stack.enter_context(make_transport("gloo", name=f"{i}")) for i in range(NUM_PEERS)]
        windows = [peer.alloc("theirs", 100, 1) for peer in peers]
        for value in range(1, 6):
            remotes = list(threads.map(lambda window: here.attach(window.descriptor()), windows))
            for peer, window, remote in zip(peers, windows, remotes, strict=True):
                here.put_signal(remote, 0, pattern(100, value), 0, value)
                peer.signal_wait_until(window, 0, value, TIMEOUT_S)
                assert window.bytes.equal(pattern(100, value))
            list(threads.map(here.detach, remotes))


def test_peer_that_does_not_answer_delays_no_other_peer() -> None:
    with ExitStack() as stack:
        here = stack.enter_context(make_transport("gloo", name="here", timeout_s=PATIENCE_S))
        there, silent = (
            stack.enter_context(make_transport("gloo", name=name)) for name in ("there", "silent")
        )
        window, lost = there.alloc("theirs", 100, 1), silent.alloc("lost", 100, 1).descriptor()
        port = silent.address()["port"]
        silent.close()
        threads = stack.enter_context(ThreadPoolExecutor(2))
        with socket.create_server(("127.0.0.1", port)) as listener:
            unanswered = threads.submit(here.attach, lost)
            visitor, _ = listener.accept()
            with visitor:
                for value in (1, 2):
                    remote = threads.submit(here.attach, window.descriptor()).result(PATIENCE_S)
                    here.put_signal(remote, 0, pattern(100, value), 0, value)
                    there.signal_wait_until(window, 0, value, TIMEOUT_S)
                    threads.submit(here.detach, remote).result(PATIENCE_S)
                assert not unanswered.done()
            with pytest.raises(PeerUnreachableError):
                unanswered.result(PATIENCE_S)


def test_visitor_that_says_nothing_sensible_does_no_harm() -> None:
    with make_transport("gloo", name="here") as here, make_transport("gloo", name="there") as there:
        window = there.alloc("theirs", 100, 1)
        port = there.address()["port"]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        here.put_signal(here.attach(window.descriptor()), 0, pattern(100, 1), 0, 1)
        there.signal_wait_until(window, 0, 1, TIMEOUT_S)
        assert window.bytes.equal(pattern(100, 1))


def test_links_are_accepted_again_after_a_lack_of_file_descriptors(monkeypatch) -> None:
    monkeypatch.setattr("moe_lora.dist.transport.gloo_link._ACCEPT_PAUSE_S", 0.0)
    accept, lacks = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")]
    monkeypatch.setattr(socket.socket, "accept", lambda sock: fails(lacks) or accept(sock))
    with make_transport("gloo", name="here") as here, make_transport("gloo", name="there") as there:
        here.attach(there.alloc("theirs", 8, 1).descriptor())
    assert not lacks


def fails(errors: list[OSError]) -> None:
    if errors:
        raise errors.pop()


@pytest.mark.parametrize("said", [b"", b"0" * 31, b"0" * 32, b"0" * 64])
def test_stranger_who_knows_only_the_port_is_not_told_the_tag(said: bytes) -> None:
    with make_transport("gloo", name="there") as there:
        there.alloc("theirs", 100, 1).descriptor()
        with socket.create_connection(("127.0.0.1", there.address()["port"]), timeout=TIMEOUT_S) as stranger:
            heard = b""
            with suppress(OSError):  # the owner may hang up before all is read
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                heard = stranger.recv(100)
            assert heard == b""


@pytest.mark.parametrize(
    ("offset", "num_bytes", "signal"), [(90, 20, 0), (-10, 20, 0), (1 << 60, 20, 0), (0, 20, 1), (0, 20, -1)]
)
def test_put_beyond_the_window_is_refused_by_the_owner_too(offset: int, num_bytes: int, signal: int) -> None:
    with make_transport("gloo", name="here") as here, make_transport("gloo", name="there") as there:
        window = there.alloc("theirs", 100, 1)
        remote = here.attach(window.descriptor())
        with suppress(RuntimeError):  # the owner may break the link while this is sent
            remote.link.put(remote.number, offset, pattern(num_bytes, 1), signal, 7)
        with pytest.raises(RuntimeError):
            remote.link.ask(Op.QUIET, remote.number)
        assert not window.bytes.any()
        assert window.read_signal(0) == 0
        with pytest.raises(PeerGoneError):
            here.quiet(remote)
        again = here.attach(window.descriptor())
        here.put_signal(again, 0, pattern(100, 1), 0, 1)
        there.signal_wait_until(window, 0, 1, TIMEOUT_S)
        assert window.bytes.equal(pattern(100, 1))


def test_get_beyond_the_window_is_refused_by_the_owner_too() -> None:
    with make_transport("gloo", name="here") as here, make_transport("gloo", name="there") as there:
        remote = here.attach(there.alloc("theirs", 100, 1).descriptor())
        out = torch.zeros(50, dtype=torch.uint8)
        with pytest.raises(RuntimeError):
            remote.link.ask(Op.GET, remote.number, 60, out)


def test_put_to_a_peer_that_stalls_ends_soon() -> None:
    """timeout_s is for connections and answers: a loop that serves many peers can't wait that long."""
    peer = Peer()
    peer.call("join", "gloo", "stalled", {})
    with make_transport("gloo", name="here", timeout_s=600.0, put_timeout_s=0.2) as here:
        remote = here.attach(peer.call("alloc", "theirs", 1 << 24, 1))
        peer.send_signal(signal.SIGSTOP)
        wake_up = threading.Timer(PATIENCE_S, peer.send_signal, (signal.SIGCONT,))
        wake_up.start()
        with pytest.raises(PeerGoneError, match="'theirs' of 'stalled'"):
            put_often(here, remote)
        wake_up.cancel()
        assert not remote.alive()
    peer.kill()


def put_often(here: Transport, remote: RemoteWindow) -> None:
    """The system takes some bytes before a stalled peer holds up the rest."""
    for value in range(1, 100):
        here.put_signal(remote, 0, pattern(1 << 24, 1), 0, value)


def greet(listener: socket.socket) -> None:
    """As a mail server would."""
    visitor, _ = listener.accept()
    with visitor:
        visitor.recv(100)
        visitor.sendall(b"220 mail.example ESMTP, ready when you are\r\n")


def test_port_that_another_process_has_taken_is_no_peer() -> None:
    with make_transport("gloo", name="here") as here, make_transport("gloo", name="there") as there:
        descriptor = there.alloc("theirs", 100, 1).descriptor()
        port = there.address()["port"]
        there.close()
        with socket.create_server(("127.0.0.1", port)) as other:
            other.listen()
            with ThreadPoolExecutor(1) as threads:
                answer = threads.submit(greet, other)
                with pytest.raises(PeerUnreachableError, match="another process has its port"):
                    here.attach(descriptor)
                answer.result()
