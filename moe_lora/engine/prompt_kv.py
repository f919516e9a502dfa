# SPDX-License-Identifier: Apache-2.0
"""Prompts of `prefill_only` requests: KV leaves beside later steps, and the first token holds the request.

A page has all layers; after the last step, the pages of this step are left.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from moe_lora.core.errors import MoveError
from moe_lora.engine.client.messages import KvSent, KvWindow
from moe_lora.engine.sequence import Sequence


@dataclass(eq=False)
class _Prompt:
    """window, sent: of a move.  put: a thread's last work, up to num_blocks."""

    sequence: Sequence
    is_announced: bool = False
    window: KvWindow | None = None
    sent: Future[KvSent] | None = None
    put: Future[KvSent] | None = None
    num_blocks: int = 0


class Prompts:
    """Requests before the first token.  kv_send: runs in `threads`."""

    def __init__(
        self,
        is_live: Callable[[Sequence], bool],
        threads: ThreadPoolExecutor,
        kv_send: Callable[[str, KvWindow], KvSent],
        block_size: int,
    ) -> None:
        self._is_live = is_live
        self._threads = threads
        self._kv_send = kv_send
        self._block_size = block_size
        self._prompts: list[_Prompt] = []

    def add(self, sequence: Sequence) -> None:
        self._prompts.append(_Prompt(sequence))

    def announce(self) -> list[Sequence]:
        """Hold requests with a first token; returns prompts after the first of several steps, once each."""
        found = []
        for prompt in list(self._prompts):
            sequence = prompt.sequence
            if sequence.num_generated and sequence.num_left > 0:
                sequence.held = sequence.kept = True
                self._prompts.remove(prompt)
                _finish(prompt)
            elif sequence.num_computed and sequence.num_left > 1 and not prompt.is_announced:
                prompt.is_announced = True
                if sequence.record is None and self._is_live(sequence):  # a target computes reports anew
                    found.append(sequence)
        return found

    def send(self, sequence: Sequence, window: KvWindow) -> Future[KvSent] | None:
        """Put filled pages until the first token; None after that token.  Raises MoveError."""
        prompt = next((one for one in self._prompts if one.sequence is sequence), None)
        if prompt is None:
            return None
        if prompt.sent is not None or (prompt.put is not None and not prompt.put.done()):
            raise MoveError("the prompt's KV is on the way to another instance")
        prompt.window, prompt.sent, prompt.put, prompt.num_blocks = window, Future(), None, 0
        sent = prompt.sent
        self._put(prompt)
        return sent

    def tend(self) -> None:
        """Put filled pages; end moves of ended requests."""
        for prompt in list(self._prompts):
            sequence = prompt.sequence
            if not self._is_live(sequence):
                self._prompts.remove(prompt)
                if prompt.sent is not None:
                    prompt.sent.set_result(KvSent(0, 0))
            elif sequence.held:
                _fail(prompt, MoveError("a pause covers the prompt"))
            elif prompt.sent is not None and (prompt.put is None or prompt.put.done()):
                self._put(prompt)

    def _put(self, prompt: _Prompt) -> None:
        error = None if prompt.put is None else prompt.put.exception()
        if error is not None:
            _fail(prompt, error)
        elif self._num_filled(prompt) != prompt.num_blocks:
            assert prompt.window is not None
            prompt.put = self._threads.submit(self._put_filled, prompt, prompt.window)

    def _put_filled(self, prompt: _Prompt, window: KvWindow) -> KvSent:
        """Put until no page is filled meanwhile: the link waits for no step."""
        while True:
            prompt.num_blocks = self._num_filled(prompt)
            sent = self._kv_send(prompt.sequence.request.request_id, window)
            if prompt.sent is None or self._num_filled(prompt) <= prompt.num_blocks:
                return sent

    def _num_filled(self, prompt: _Prompt) -> int:
        return prompt.sequence.num_computed // self._block_size


def _fail(prompt: _Prompt, error: BaseException) -> None:
    sent, prompt.sent = prompt.sent, None
    if sent is not None:
        sent.set_exception(error)


def _finish(prompt: _Prompt) -> None:
    if prompt.sent is not None and prompt.put is not None:
        prompt.put.add_done_callback(partial(_pass_on, prompt.sent))
    elif prompt.sent is not None:
        prompt.sent.set_result(KvSent(0, 0))


def _pass_on(sent: Future[KvSent], put: Future[KvSent]) -> None:
    if put.cancelled():  # by the engine's end
        sent.cancel()
    elif error := put.exception():
        sent.set_exception(error)
    else:
        sent.set_result(put.result())
