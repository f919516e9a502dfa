# SPDX-License-Identifier: Apache-2.0
"""A follower with faults, in place of `moe_lora.engine.ranks.follower`.  FAULTS: how often each happens."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace

from moe_lora.core.errors import LoraServerError
from moe_lora.core.teardown import run_child
from moe_lora.dist.deltas.remote_backend import RemoteBackend
from moe_lora.engine.adapters.copies import BringAdapter, RankCopier
from moe_lora.engine.ranks import followers
from moe_lora.engine.ranks.follower import follow
from moe_lora.engine.ranks.rank import Rank
from moe_lora.engine.step.runner import ModelRunner
from moe_lora.models.weight_merge import WeightMerge

FAULTS = "MOE_LORA_TEST_FAULTS"
BAD_TOKEN = 99

_left: dict[str, int] = {}


def use_faulty_followers(monkeypatch, faults: dict[str, int]) -> None:
    """Engines built from now on have followers with these faults."""
    start = followers.start_child
    monkeypatch.setenv(FAULTS, json.dumps(faults))
    monkeypatch.setattr(followers, "start_child", lambda name, **rest: start(__name__, **rest))


def _is_due(kind: str) -> bool:
    _left[kind] = _left.get(kind, 0) - 1
    return _left[kind] >= 0


def _break_steps() -> None:
    execute = ModelRunner.execute

    def maybe(self, batch):
        is_bad = BAD_TOKEN in batch.tokens.tolist()
        if is_bad and _is_due("stopped_in_step"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if is_bad and _is_due("hangs_in_step"):
            threading.Event().wait()
        if is_bad and _is_due("before_step"):
            raise RuntimeError("a kernel of this follower refused its operands")
        logits = execute(self, batch)
        if is_bad and _is_due("after_step"):
            raise RuntimeError("a kernel of this follower refused its operands")
        return logits

    ModelRunner.execute = maybe


def _break_copies() -> None:
    begin = RankCopier.begin

    def maybe(self, order):
        if isinstance(order, BringAdapter):
            if _is_due("open"):
                raise OSError("too many open files on this follower")
            return late(begin(self, order))
        return begin(self, order)

    def late(steps):
        for number, size in enumerate(steps):
            if number and _is_due("copy"):
                raise OSError("the disk of this follower is gone")
            if _is_due("late"):
                time.sleep(0.02)
            yield size

    RankCopier.begin = maybe


def _break_merges() -> None:
    fold_in = WeightMerge.fold_in

    def maybe(self, *given):
        fold_in(self, *given)
        if _is_due("fold"):
            raise RuntimeError("this follower has no room for a copy")

    WeightMerge.fold_in = maybe


def _break_meetings() -> None:
    def broken(name):
        meet = getattr(Rank, name)

        def maybe(self, path):
            if self.dist_rank == self.config.num_ranks - 1:
                for kind, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
                    if _is_due(f"{kind}_in_{name}"):
                        os.kill(os.getpid(), number)
            return meet(self, path)

        setattr(Rank, name, maybe)

    broken("join")
    broken("meet")


def _break_moves() -> None:
    reach = Rank.reach

    def maybe(self, server, *limit_s):
        if hasattr(self, "lora_server"):  # not the connection of the start
            if _is_due("killed_in_reach"):
                os.kill(os.getpid(), signal.SIGKILL)
            if _is_due("no_reach"):
                raise LoraServerError("this follower reaches nobody")
        return reach(self, server, *limit_s)

    Rank.reach = maybe


def _break_links() -> None:
    send = RemoteBackend._send

    def maybe(self, server, *given):
        links = self._links
        if _is_due("no_session"):
            self._links = {server: SimpleNamespace(session=None)}
        try:
            return send(self, server, *given)
        finally:
            self._links = links

    RemoteBackend._send = maybe


if __name__ == "__main__":
    _left.update(json.loads(os.environ[FAULTS]))
    _break_steps()
    _break_copies()
    _break_merges()
    _break_meetings()
    _break_moves()
    _break_links()
    run_child(lambda fd: follow(Connection(fd)))
