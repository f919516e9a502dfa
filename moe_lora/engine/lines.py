"""Several connections to one engine loop: whose request is which, and what each adds to the load."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from moe_lora.core.request import TokenOutput

from .failover import token_work
from .inbox import Inbox
from .messages import Abort, Beat, Command, Event, Generate, Outputs, Rejected, Reply, Stop


class Line:
    """One connection.  send: takes its events, from the loop's threads."""

    def __init__(self, send: Callable[[Event], None]) -> None:
        self.send = send


@dataclass(eq=False)
class _Asked:
    """A request under way.  num_prompt: prompt tokens, until it has a token; left: what it may still need."""

    line: Line
    request_id: str
    num_prompt: int
    left: int

    def take(self, output: TokenOutput) -> TokenOutput:
        """The output as its line knows it."""
        self.left -= self.num_prompt + len(output.token_ids)
        self.num_prompt = 0
        return output if output.request_id == self.request_id else replace(output, request_id=self.request_id)


class Lines:
    """Hands commands of all lines to an engine loop, and its events back to the line that asked.

    Two lines may use the same ids; what the loop says to a line that was closed is dropped.
    """

    def __init__(self, inbox: Inbox, max_model_len: int) -> None:
        self._inbox = inbox
        self._max_model_len = max_model_len
        self._lock = threading.Lock()
        self._open: set[Line] = set()
        self._requests: dict[str, _Asked] = {}
        self._names: dict[tuple[Line, str], str] = {}
        self._calls: dict[int, tuple[Line, int]] = {}
        self._numbers = itertools.count(1)

    def open(self, send: Callable[[Event], None]) -> Line:
        line = Line(send)
        with self._lock:
            self._open.add(line)
        return line

    def close(self, line: Line) -> None:
        """End the requests of a line, and no other's."""
        with self._lock:
            self._open.discard(line)
            ended = [name for name, asked in self._requests.items() if asked.line is line]
        for name in ended:
            self._inbox.put(Abort(name))

    def put(self, line: Line, command: Command) -> None:
        """Hand on what a line asks."""
        # Of a front end that is told apart by nobody: it may not stop an engine that others ask.
        assert not isinstance(command, Stop)
        if isinstance(command, Generate):
            self._inbox.put(self._named(line, command))
            return
        with self._lock:
            if isinstance(command, Abort):
                name = self._names.get((line, command.request_id))
                if name is None:
                    return
                command = Abort(name)
            else:
                number = next(self._numbers)
                self._calls[number] = line, command.call_id
                command = replace(command, call_id=number)
        self._inbox.put(command)

    def _named(self, line: Line, command: Generate) -> Generate:
        """The request by a name that no other under way has: its own, if it can be."""
        request = command.request
        with self._lock:
            name = request.request_id
            while name in self._requests:
                name = f"{request.request_id} ({next(self._numbers)})"
            self._requests[name] = _Asked(
                line,
                request.request_id,
                len(request.prompt_token_ids),
                token_work(request, self._max_model_len),
            )
            self._names[line, request.request_id] = name
        return command if name == request.request_id else Generate(replace(request, request_id=name))

    def emit(self, event: Event) -> None:
        """Hand an event to those it is for; called from the loop's threads."""
        parts: list[tuple[Line, Event]] = []
        with self._lock:
            if isinstance(event, Outputs):
                parts += ((line, Outputs(outputs)) for line, outputs in self._sorted(event.outputs).items())
            elif isinstance(event, Rejected):
                asked = self._ended(event.request_id)
                parts.append((asked.line, Rejected(asked.request_id, event.error)))
            elif isinstance(event, Reply):
                line, call_id = self._calls.pop(event.call_id)
                parts.append((line, replace(event, call_id=call_id)))
            else:
                parts += ((line, event) for line in self._open)
            parts = [(line, part) for line, part in parts if line in self._open]
        for line, part in parts:
            line.send(part)

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

    def _ended(self, name: str) -> _Asked:
        asked = self._requests.pop(name)
        key = asked.line, asked.request_id
        if self._names.get(key) == name:
            del self._names[key]
        return asked

    def elsewhere(self, line: Line, stuck_s: float) -> Beat:
        """A beat that tells a line of the requests of all others."""
        with self._lock:
            others = [asked for asked in self._requests.values() if asked.line is not line]
            return Beat(
                stuck_s=stuck_s,
                num_running=sum(not asked.num_prompt for asked in others),
                num_waiting=sum(asked.num_prompt > 0 for asked in others),
                outstanding_tokens=sum(asked.left for asked in others),
            )
