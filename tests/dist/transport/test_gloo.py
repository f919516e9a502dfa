"""What only the gloo transport can get wrong: its links."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from moe_lora.core.errors import PeerUnreachableError
from moe_lora.dist.transport import make_transport

from .peers import TIMEOUT_S, pattern

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


def test_visitor_that_says_nothing_sensible_does_no_harm() -> None:
    with make_transport("gloo", name="here") as here, make_transport("gloo", name="there") as there:
        window = there.alloc("theirs", 100, 1)
        port = there.address()["port"]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        here.put_signal(here.attach(window.descriptor()), 0, pattern(100, 1), 0, 1)
        there.signal_wait_until(window, 0, 1, TIMEOUT_S)
        assert window.bytes.equal(pattern(100, 1))


def test_port_that_another_process_has_taken_is_no_peer() -> None:
    with make_transport("gloo", name="here") as here, make_transport("gloo", name="there") as there:
        descriptor = there.alloc("theirs", 100, 1).descriptor()
        port = there.address()["port"]
        there.close()
        with socket.create_server(("127.0.0.1", port)) as other:
            other.listen()
            with ThreadPoolExecutor(1) as threads:
                answer = threads.submit(lambda: other.accept()[0].sendall(b"220 mail.example ESMTP\r\n"))
                with pytest.raises(PeerUnreachableError, match="another process has its port"):
                    here.attach(descriptor)
                answer.result()
