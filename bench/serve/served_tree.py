# SPDX-License-Identifier: Apache-2.0
"""A `moe-lora serve` of some tree, as a contestant of benches that compare two."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.request import urlopen

Served = TypeVar("Served", bound="ServedTree")


class ServedTree:
    """A server of one tree with these words behind `serve`, during the context."""

    def __init__(self, tree: Path, python: str, *words: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        command = [python, "-m", "moe_lora.cli.main", "serve", *words, "--port", str(self.port)]
        path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
        environ = {**os.environ, "PYTHONPATH": path}
        self._log = os.memfd_create("log")
        self.process = subprocess.Popen(command, cwd=tree, env=environ, stderr=self._log)

    def __enter__(self: Served) -> Served:
        while self.process.poll() is None:
            try:
                urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10).close()
            except OSError:
                time.sleep(0.5)
            else:
                return self
        raise RuntimeError(f"the server ended: {os.pread(self._log, 1 << 20, 0).decode()[-2000:]}")

    def logged(self, pattern: str) -> set[str]:
        """The different matches of a pattern in the log."""
        log = os.pread(self._log, os.fstat(self._log).st_size, 0).decode()
        return set(re.findall(pattern, log))

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.terminate()
        self.process.wait(60)
        os.close(self._log)


async def posted(
    port: int, path: str, asked: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection with this body sent; the server closes it after the answer."""
    body = json.dumps(asked).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    return reader, writer


async def event_times(port: int, path: str, asked: dict[str, Any]) -> tuple[list[float], bytes]:
    """When each event of a stream came, and the last line."""
    reader, writer = await posted(port, path, asked)
    times_s, line = [], b""
    async for line in reader:
        if line.startswith(b"data: {"):
            times_s.append(time.perf_counter())
    writer.close()
    return times_s, line
