# SPDX-License-Identifier: Apache-2.0
"""Mixed load: streams, whole answers, aborts, mistakes, and adapters that come and go."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.records import ROOT

ADAPTERS = ROOT / "demo" / "adapters"
MODELS = ("model", "rot13", "reverse", "upper", "leet")
PROMPTS = ("the quick brown fox:", "a:", "abcdefgh=", "so it goes, and goes on:")
NUM_LOADED = 12
"""Loaded adapters at once."""
LARGE_BYTES = 24_000
"""A larger body goes to the process for large bodies."""
GIVE_UP_S = 120.0


@dataclass
class Answer:
    """status 0: the connection failed, or the answer broke off.  text: whole or partial answer."""

    status: int
    text: str = ""


async def ask(
    port: int, path: str, body: bytes, *, address: str = "127.0.0.1", num_events: float = float("inf")
) -> Answer:
    """One request over a new connection.  num_events: of a stream, before the client leaves."""
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
        try:
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            status = int((await reader.readline()).split()[1])
            while (await reader.readline()).strip():
                pass
            if "completions" in path and status == 200:
                return await _read(reader, num_events)
            return Answer(status, (await reader.read()).decode())
        finally:
            writer.close()
    except (OSError, IndexError, ValueError, asyncio.LimitOverrunError):
        return Answer(0)


async def _read(reader: asyncio.StreamReader, num_events: float) -> Answer:
    """Of a stream, or of an answer in one piece."""
    text = ""
    async for line in reader:
        if line.startswith(b'data: {"error"'):
            return Answer(json.loads(line[6:])["error"]["code"], text)
        if line.startswith(b"data: {"):
            text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
            num_events -= 1
            if num_events <= 0:
                return Answer(200, text)
        elif line.startswith(b"data: [DONE]"):
            return Answer(200, text)
        elif line.startswith(b"{"):
            return Answer(200, "".join(one["text"] for one in json.loads(line)["choices"]))
    return Answer(0, text)


@dataclass
class MixedLoad:
    """Sends requests to a server until `stop`.

    counts: requests by kind and status.  complaints: wrong answers; a greedy answer must equal the model's
    first answer to the prompt.
    """

    port: int
    folder: Path
    seed: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._first: dict[tuple[str, str], str] = {}
        self._stopping = False
        self._numbers = itertools.count()

    def stop(self) -> None:
        self._stopping = True

    async def run(self, num_clients: int) -> None:
        kinds: tuple[tuple[int, Callable[[], Any]], ...] = (
            (60, self._stream),
            (15, self._abort),
            (10, self._whole),
            (10, self._mistake),
            (5, self._large),
        )
        weights, kind = [weight for weight, _ in kinds], [one for _, one in kinds]

        async def client() -> None:
            while not self._stopping:
                await asyncio.wait_for(self._rng.choices(kind, weights)[0](), GIVE_UP_S)

        await asyncio.gather(*(client() for _ in range(num_clients)), self._load_adapters())

    def _body(self, model: str, prompt: str, **more: Any) -> bytes:
        asked = {"model": model, "prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
        return json.dumps({**asked, "stream": True, **more}).encode()

    async def _ask(self, kind: str, body: bytes, allowed: tuple[int, ...], **more: Any) -> Answer:
        answer = await ask(self.port, "/v1/completions", body, **more)
        self.counts[f"{kind} {answer.status}"] += 1
        if answer.status not in allowed:
            self.complaints.append(f"{kind}: {answer}")
        return answer

    async def _stream(self) -> None:
        model, prompt = self._rng.choice(MODELS), self._rng.choice(PROMPTS)
        answer = await self._ask("stream", self._body(model, prompt), (200, 503))
        if answer.status == 200:
            first = self._first.setdefault((model, prompt), answer.text)
            if answer.text != first:
                self.complaints.append(f"{model} said {answer.text!r} to {prompt!r}, and {first!r} before")

    async def _abort(self) -> None:
        body = self._body(self._rng.choice(MODELS), self._rng.choice(PROMPTS))
        await self._ask("abort", body, (200, 503), num_events=self._rng.randrange(1, 20))

    async def _whole(self) -> None:
        body = self._body(self._rng.choice(MODELS), "a:", n=3, stream=False, temperature=1.0)
        await self._ask("whole", body, (200, 503))

    async def _mistake(self) -> None:
        wrong: list[tuple[bytes, int]] = [
            (self._body("nobody", "a:"), 404),
            (self._body("rot13", "a:", max_tokens=-1), 400),
            (b'{"prompt": [', 400),
        ]
        body, status = self._rng.choice(wrong)
        await self._ask("mistake", body, (status, 503))

    async def _large(self) -> None:
        body = self._body(self._rng.choice(MODELS), "a:", max_tokens=4) + b" " * LARGE_BYTES
        await self._ask("large", body, (200, 503))

    async def _load_adapters(self) -> None:
        """Load, ask, replace, ask, and unload the oldest, with new content each time."""
        loaded: list[str] = []
        while not self._stopping:
            name = f"come-{next(self._numbers)}"
            for _ in range(2):
                place = self._fresh()
                body = {"lora_name": name, "lora_path": str(place), "load_inplace": True}
                answer = await ask(self.port, "/v1/load_lora_adapter", json.dumps(body).encode())
                self._note("load", answer)
                shutil.rmtree(place)
                await self._ask("loaded", self._body(name, "a:", max_tokens=4), (200, 503))
            loaded.append(name)
            if len(loaded) > NUM_LOADED:
                body = {"lora_name": loaded.pop(0)}
                self._note(
                    "unload", await ask(self.port, "/v1/unload_lora_adapter", json.dumps(body).encode())
                )
            await asyncio.sleep(0.2)

    def _note(self, kind: str, answer: Answer) -> None:
        self.counts[f"{kind} {answer.status}"] += 1
        if answer.status != 200:
            self.complaints.append(f"{kind}: {answer}")

    def _fresh(self) -> Path:
        """A folder with an adapter's files, a few bytes of a weight drawn anew."""
        place = self.folder / f"fresh-{next(self._numbers)}"
        shutil.copytree(ADAPTERS / self._rng.choice(MODELS[1:]), place)
        weights = place / "adapter_model.safetensors"
        content = bytearray(weights.read_bytes())
        for byte in (-2, -4, -6, -8):  # the low bytes of bf16 values
            content[byte] = self._rng.randrange(256)
        weights.write_bytes(content)
        return place
