"""Several connections to one engine loop: whose request is which, and what each adds to the load."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from moe_lora.core.request import GenerateRequest, TokenOutput
from moe_lora.dist.net.codec import Message
from moe_lora.dist.net.peer import Asked

from .failover import token_work
from moe_lora.engine.client.inbox import Inbox
from moe_lora.engine.client.messages import Abort, Beat, Call, Dead, Event, Generate, Outputs, Rejected, Reply, Request


class Line(Protocol):
    """One connection, which takes its events."""

    def send(self, message: Message) -> None: ...


@dataclass(eq=False)
class _Request:
    """A request under way.  num_prompt: prompt tokens, until it has a token; left: what it may still need."""

    line: Line
    request_id: str
    num_prompt: int
    left: int

    def take(self, output: TokenOutput) -> TokenOutput:
        """The output as its line knows it."""
        self.left -= self.num_prompt + len(output.token_ids)
        self.num_prompt = 0
        if output.request_id == self.request_id:
            return output
        return msgspec.structs.replace(output, request_id=self.request_id)


class Lines:
    """Hands commands of all lines to an engine loop, and its events back to the line that asked.

    Two lines may use the same ids; what the loop says to a line that was closed is dropped.  Belongs to the
    event loop of the connections.
    """

    def __init__(self, inbox: Inbox, max_model_len: int) -> None:
        self._inbox = inbox
        self._max_model_len = max_model_len
        self._open: list[Line] = []
        self._requests: dict[str, _Request] = {}
        self._names: dict[tuple[Line, str], str] = {}
        self._calls: dict[int, tuple[Line, Asked]] = {}
        self._numbers = itertools.count(1)

    def open(self, line: Line) -> Line:
        self._open.append(line)
        return line

    def close(self, line: Line) -> None:
        """End the requests of a line, and no other's."""
        self._open.remove(line)
        for name, asked in self._requests.items():
            if asked.line is line:
                self._inbox.put(Abort(name))

    def put(self, line: Line, message: Message | Asked) -> None:
        """Hand on what a line asks."""
        if isinstance(message, Asked):
            number = next(self._numbers)
            self._calls[number] = line, message
            self._inbox.put(Call(number, message.method, message.args))
        elif isinstance(message, Request):
            try:
                request = message.decoded()
            except TypeError as error:
                line.send(Rejected(message.request_id, error))
            else:
                self._inbox.put(Generate(self._named(line, request)))
        elif isinstance(message, Abort):
            name = self._names.get((line, message.request_id))
            if name is not None:
                self._inbox.put(Abort(name))

    def _named(self, line: Line, request: GenerateRequest) -> GenerateRequest:
        """The request by a name that no other under way has: its own, if it can be."""
        name = request.request_id
        while name in self._requests:
            name = f"{request.request_id} ({next(self._numbers)})"
        work = token_work(request, self._max_model_len)
        self._requests[name] = _Request(line, request.request_id, len(request.prompt_token_ids), work)
        self._names[line, request.request_id] = name
        return request if name == request.request_id else replace(request, request_id=name)

    def emit(self, event: Event) -> None:
        """Hand an event of the loop to those it is for."""
        if isinstance(event, Outputs):
            for line, outputs in self._sorted(event.outputs).items():
                self._send(line, Outputs(outputs))
        elif isinstance(event, Rejected):
            asked = self._ended(event.request_id)
            self._send(asked.line, Rejected(asked.request_id, event.error))
        elif isinstance(event, Reply):
            line, call = self._calls.pop(event.call_id)
            if line not in self._open:
                return
            if event.error is None:
                call.answer(event.value)
            else:
                call.fail(event.error)
        elif isinstance(event, Dead):
            for line in self._open:
                line.send(event)

    def _send(self, line: Line, message: Message) -> None:
        if line in self._open:
            line.send(message)

    def _sorted(self, outputs: list[TokenOutput]) -> dict[Line, list[TokenOutput]]:
        """The outputs of each line; not those of a request whose id its line uses for another by now."""
        found: dict[Line, list[TokenOutput]] = {}
        for output in outputs:
            name = output.request_id
            asked = self._requests[name]
            if self._names.get((asked.line, asked.request_id)) == name:
                found.setdefault(asked.line, []).append(asked.take(output))
            if output.finish_reason is not None:
                self._ended(name)
        return found

    def _ended(self, name: str) -> _Request:
        asked = self._requests.pop(name)
        key = asked.line, asked.request_id
        if self._names.get(key) == name:
            del self._names[key]
        return asked

    def elsewhere(self, line: Line, stuck_s: float) -> Beat:
        """A beat that tells a line of the requests of all others."""
        others = [asked for asked in self._requests.values() if asked.line is not line]
        return Beat(
            stuck_s=stuck_s,
            num_running=sum(not asked.num_prompt for asked in others),
            num_waiting=sum(asked.num_prompt > 0 for asked in others),
            outstanding_tokens=sum(asked.left for asked in others),
        )
