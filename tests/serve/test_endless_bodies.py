# SPDX-License-Identifier: Apache-2.0
"""Adapters of 5 GB at each entrance of a server with default limits: refused at their beginning."""

from __future__ import annotations

import base64
import http.client
import itertools
import json
import select
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import pytest

from tests.patience import PATIENCE_S

from .demo_server import DEMO, DemoServer, demo_server
from .test_controls import Http
from .test_received import CONFIG, HEADERS, in_base64

NUM_BYTES = 5_000_000_000
PIECE = bytes(1 << 16)
MOST_SENT_BYTES = 64 << 20
"""Buffers of sockets take some MB before a client sees the refusal."""
MOST_MEMORY_BYTES = 256 << 20
"""Growth of a process's peak."""


def header(entries: str) -> bytes:
    return struct.pack("<Q", len(entries)) + entries.encode()


def tensor_of(num_bytes: int) -> bytes:
    """The header of one tensor."""
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    entry = {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes]}
    return header(json.dumps({key: entry}))


STARTS = {
    "zeros": (b"", 400, "only zero bytes"),
    "a tensor of 5 GB": (tensor_of(NUM_BYTES), 413, "received_mb=4096"),
    "more than its header names": (tensor_of(400), 400, "and more arrive"),
    "an endless header": (struct.pack("<Q", 1 << 40) + b"{", 400, "at most 100000000 are read"),
    "a pickle": (b"\x80\x04", 400, "is a pickle"),
}
STATED = {"chunked": None, "stated": NUM_BYTES, "stated as less": 3_000_000_000, "stated as few": 3 << 16}


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield shutil.copytree(DEMO / "adapters", Path(folder, "adapters"))


@pytest.fixture(scope="module")
def server(shared, tmp_path_factory) -> Iterator[DemoServer]:
    options = ("--lora-dir", str(shared), "--adapter-root", str(shared), "--eager", "--dtype", "float32")
    with demo_server(tmp_path_factory.mktemp("endless") / "log", *options) as server:
        Http(server.url).complete("upper")
        yield server


class Peaks:
    """Peak memory of the server's processes since the start of a test."""

    def __init__(self, server: DemoServer) -> None:
        self._pids = [server.process.pid, *server.engine_pids()]
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._before = self._values()

    def _values(self) -> list[int]:
        texts = [Path(f"/proc/{pid}/status").read_text() for pid in self._pids]
        return [int(text.split("VmHWM:")[1].split()[0]) << 10 for text in texts]

    def check(self) -> None:
        growths = [after - before for after, before in zip(self._values(), self._before, strict=True)]
        assert max(growths) < MOST_MEMORY_BYTES


@pytest.fixture
def guarded(server, shared) -> Iterator[Http]:
    """The server, with bounds on memory and disk, and the same answers before and after."""
    http, peaks = Http(server.url), Peaks(server)
    before = http.complete("upper")
    yield http
    assert http.complete("upper") == before
    peaks.check()
    assert not [*shared.glob("*received*/*")]


def sent(url: str, method: str, path: str, head: dict[str, str], pieces: Iterator[bytes]) -> tuple[int, str]:
    """Status and text of the answer, before the end of the pieces."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=PATIENCE_S)
    connection.putrequest(method, path)
    for name, value in head.items():
        connection.putheader(name, value)
    connection.endheaders()
    num_sent, sock = 0, connection.sock
    for piece in pieces:
        if select.select([sock], [], [], 0)[0]:
            break
        chunk = b"%x\r\n%s\r\n" % (len(piece), piece) if "Transfer-Encoding" in head else piece
        try:
            connection.send(chunk)
        except OSError:  # the server has answered and closed
            break
        num_sent += len(piece)
        assert num_sent < MOST_SENT_BYTES
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def length_head(num_bytes: int | None) -> dict[str, str]:
    if num_bytes is None:
        return {"Transfer-Encoding": "chunked"}
    return {"Content-Length": str(num_bytes)}


@pytest.mark.slow
@pytest.mark.parametrize("start", list(STARTS))
@pytest.mark.parametrize("length", list(STATED))
@pytest.mark.parametrize("entrance", ["tensors", "base64"])
def test_an_endless_body_ends_at_its_beginning(server, guarded, start, length, entrance):
    content, status, said = STARTS[start]
    stated = STATED[length]
    pieces = itertools.chain([content + PIECE], itertools.repeat(PIECE))
    if entrance == "tensors":
        if stated == NUM_BYTES:
            status, said = 413, "received_mb=4096"
        head = {**HEADERS, **length_head(stated)}
        found = sent(server.url, "PUT", "/v1/adapters/endless", head, pieces)
    else:
        opening = json.dumps(in_base64(b"")).rpartition('"]')[0].encode()
        coded = base64.b64encode((content + PIECE)[: len(PIECE) // 3 * 3])
        pieces = itertools.chain([opening, coded], itertools.repeat(b"A" * len(PIECE)))
        head = {"Content-Type": "application/json", **length_head(stated)}
        found = sent(server.url, "POST", "/load_lora_adapter_from_tensors", head, pieces)
    if length == "stated as few":  # the rest is no request: its refusal may come first
        assert found[0] in (400, status), found
    else:
        assert (found[0], said in found[1]) == (status, True), found


@pytest.mark.slow
@pytest.mark.parametrize("start", list(STARTS))
@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/load_lora_adapter"])
def test_a_large_file_in_shared_memory_is_refused_unread(guarded, shared, start, path):
    folder = shared / "large"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(CONFIG)
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(STARTS[start][0])
        file.truncate(NUM_BYTES)
    body = {"lora_name": "endless", "lora_path": str(folder), "is_3d_lora_weight": True}
    answer = guarded("POST", path, json=body)
    assert (answer.status_code, "adapter_model.safetensors" in answer.text) == (400, True), answer.text
    if start in ("zeros", "a pickle"):
        assert STARTS[start][2].removeprefix("is ") in answer.text
    shutil.rmtree(folder)
