# SPDX-License-Identifier: Apache-2.0
"""An adapter that is replaced again and again while parts of the cluster are killed."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

import httpx

from .chaos_model import ChaosModel, Question

NAME = "changing"
PAUSE_S = 0.4
_CALL_S = 120.0


@dataclass
class _Version:
    """What was published when; done_s: when the server said so, None if it never did."""

    adapter: str
    began_s: float
    done_s: float | None = None


@dataclass(frozen=True)
class ChangingQuestion:
    """A prompt to the adapter NAME: what is right depends on what was served under the name meanwhile."""

    publisher: Publisher
    prompt: tuple[int, ...]
    answers: dict[str, tuple[int, ...]]
    adapter: str = NAME

    def right(self, began_s: float, ended_s: float) -> list[tuple[int, ...]]:
        return [self.answers[one] for one in self.publisher.served(began_s, ended_s)]

    def may_be_absent(self, began_s: float, ended_s: float) -> bool:
        return self.publisher.may_be_absent(began_s, ended_s)


class Publisher:
    """Publishes two adapters in turn under NAME.

    num_done, num_refused: publications that were confirmed, and answered with 503.  complaints: what else
    became of them.  losses_s: when all was killed that knew of them, on the monotonic clock.
    """

    def __init__(
        self, url: str, model: ChaosModel, questions: dict[str | None, list[Question]], pair: tuple[str, str]
    ) -> None:
        self.num_done = self.num_refused = 0
        self.complaints: list[str] = []
        self._url, self._model, self._pair = url, model, pair
        self.losses_s: list[float] = []
        self._stopping = False
        self._versions: list[_Version] = []
        by_prompt = [{one.prompt: one.answer for one in questions[adapter]} for adapter in pair]
        self._questions = [
            ChangingQuestion(
                self, prompt, {adapter: of[prompt] for adapter, of in zip(pair, by_prompt, strict=True)}
            )
            for prompt in by_prompt[0].keys() & by_prompt[1].keys()
        ]
        self._questions.sort(key=lambda one: one.prompt)

    def question(self, rng: random.Random) -> ChangingQuestion:
        return rng.choice(self._questions)

    def served(self, began_s: float, ended_s: float) -> set[str]:
        """Adapters that a request of this time may have met; times on the monotonic clock."""
        found = set()
        for version in reversed(self._versions):
            if version.began_s <= ended_s:
                found.add(version.adapter)
            if version.done_s is not None and version.done_s <= began_s:
                break
        return found

    def may_be_absent(self, began_s: float, ended_s: float) -> bool:
        """Whether a request of this time may have come when all was killed, and nothing published again."""
        done = [version.done_s for version in self._versions if version.done_s is not None]
        return any(
            lost_s <= ended_s and not any(lost_s < done_s <= began_s for done_s in done)
            for lost_s in self.losses_s
        )

    def stop(self) -> None:
        self._stopping = True

    async def run(self) -> None:
        """Publish, pause, publish, until `stop`."""
        while not self._stopping:
            await asyncio.sleep(PAUSE_S)
            await self.publish()

    async def publish_first(self, limit_s: float) -> None:
        """Publish until it is done: front ends may see instances before the controller does."""
        deadline_s = time.monotonic() + limit_s
        while not self.num_done and not self.complaints and time.monotonic() < deadline_s:
            await self.publish()
            await asyncio.sleep(PAUSE_S)

    async def publish(self) -> None:
        """Publish the next of the two."""
        version = _Version(self._pair[len(self._versions) % 2], time.monotonic())
        self._versions.append(version)
        place = str(self._model.adapter_dir / version.adapter)
        body = {"lora_name": NAME, "lora_path": place, "load_inplace": True}
        try:
            async with httpx.AsyncClient(base_url=self._url, timeout=_CALL_S, trust_env=False) as http:
                response = await http.post("/v1/load_lora_adapter", json=body)
        except httpx.TimeoutException:
            self.complaints.append(f"no answer to a publication within {_CALL_S:.0f} s")
        except httpx.TransportError:  # of a front end that was killed
            self.num_refused += 1
        else:
            if response.status_code == 200:
                version.done_s = time.monotonic()
                self.num_done += 1
            elif response.status_code == 503:
                self.num_refused += 1
            else:
                self.complaints.append(f"a publication failed with {response.status_code}: {response.text}")
