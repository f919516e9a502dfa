"""Dialling a place where something else answers."""

from __future__ import annotations

import socket
import struct
import threading
from multiprocessing import AuthenticationError

import pytest

from moe_lora.engine.wire import dial


def test_what_answers_without_a_challenge_is_an_error_that_those_who_dial_know():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(struct.pack("!i", 4) + b"what")
                sock.recv(1)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(AuthenticationError):
            dial("127.0.0.1", listener.getsockname()[1], b"key", None)
        thread.join(10)
        assert not thread.is_alive()
