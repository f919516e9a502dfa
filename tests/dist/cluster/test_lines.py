"""Several connections to one loop: whose request is whose."""

from __future__ import annotations

import queue

import pytest
from msgspec import Raw

from moe_lora.core.errors import EngineDeadError
from moe_lora.core.request import GenerateRequest, SamplingParams, TokenOutput
from moe_lora.dist.cluster.instance_links import ConnectionMux
from moe_lora.dist.net.codec import encode
from moe_lora.dist.net.peer import Asked
from moe_lora.engine.client.messages import (
    Abort,
    Beat,
    Dead,
    Generate,
    Inbox,
    Outputs,
    Rejected,
    Reply,
    Request,
)


class MuxedConnection:
    """One end of a connection; what it was sent."""

    def __init__(self) -> None:
        self.heard: list = []

    def send(self, message) -> None:
        self.heard.append(message)


class FrontEndListener:
    """A loop's inbox, and what came back over two lines."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.lines = ConnectionMux(self.inbox, max_model_len=64)
        self.line = {name: MuxedConnection() for name in ("one", "two")}
        for line in self.line.values():
            self.lines.open(line)

    @property
    def heard(self) -> dict[str, list]:
        return {name: line.heard for name, line in self.line.items()}

    def ask(self, line: str, request_id: str, num_prompt: int = 3, max_tokens: int = 5) -> None:
        request = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=(1,) * num_prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
        )
        self.lines.put(self.line[line], Request.of(request))

    def told(self) -> list:
        """What the loop is told, requests and calls by the names that it knows them by."""
        found = []
        while True:
            try:
                command, _ = self.inbox.get(0)
            except queue.Empty:
                return found
            found.append(command.request.request_id if isinstance(command, Generate) else command)

    def answer(self, *outputs: tuple[str, int, str | None]) -> None:
        self.lines.emit(
            Outputs([TokenOutput(request_id=name, token_ids=(token,), finish_reason=reason)
                     for name, token, reason in outputs])
        )  # fmt: skip

    def tokens(self, line: str) -> list[tuple[str, int]]:
        return [
            (output.request_id, *output.token_ids)
            for event in self.heard[line]
            if isinstance(event, Outputs)
            for output in event.outputs
        ]


@pytest.fixture
def front_end_listener() -> FrontEndListener:
    return FrontEndListener()


def test_two_lines_may_use_the_same_ids(front_end_listener):
    front_end_listener.ask("one", "a")
    front_end_listener.ask("two", "a")
    first, second = front_end_listener.told()
    assert first == "a" != second
    front_end_listener.answer((first, 1, None), (second, 2, None))
    front_end_listener.answer((second, 3, "length"), (first, 4, "length"))
    assert front_end_listener.tokens("one") == [("a", 1), ("a", 4)]
    assert front_end_listener.tokens("two") == [("a", 2), ("a", 3)]


def test_closing_a_line_ends_its_requests_and_no_others(front_end_listener):
    front_end_listener.ask("one", "a")
    front_end_listener.ask("two", "a")
    first, second = front_end_listener.told()
    front_end_listener.lines.close(front_end_listener.line["one"])
    assert front_end_listener.told() == [Abort(first)]
    front_end_listener.answer((first, 1, "abort"), (second, 2, "length"))
    assert front_end_listener.tokens("one") == []
    assert front_end_listener.tokens("two") == [("a", 2)]


def test_what_is_said_of_a_closed_lines_request_is_not_taken_for_a_later_ones(front_end_listener):
    front_end_listener.ask("one", "a")
    front_end_listener.lines.close(front_end_listener.line["one"])
    front_end_listener.ask("two", "a")
    first, abort, second = front_end_listener.told()
    assert abort == Abort(first)
    front_end_listener.answer((first, 1, "abort"))
    assert front_end_listener.tokens("two") == []
    front_end_listener.answer((second, 2, "length"))
    assert front_end_listener.tokens("two") == [("a", 2)]


def test_id_that_is_used_again_after_an_abort_gets_the_later_requests_tokens(front_end_listener):
    front_end_listener.ask("one", "a")
    front_end_listener.lines.put(front_end_listener.line["one"], Abort("a"))
    front_end_listener.ask("one", "a")
    first, abort, second = front_end_listener.told()
    assert abort == Abort(first)
    front_end_listener.answer((second, 2, "length"), (first, 1, "abort"))
    assert front_end_listener.tokens("one") == [("a", 2)]


def test_aborts_and_refusals_are_of_the_line_that_asked(front_end_listener):
    front_end_listener.ask("one", "a")
    front_end_listener.ask("two", "a")
    first, second = front_end_listener.told()
    front_end_listener.lines.put(front_end_listener.line["two"], Abort("a"))
    front_end_listener.lines.put(front_end_listener.line["two"], Abort("unknown"))
    assert front_end_listener.told() == [Abort(second)]
    error = ValueError("too long")
    front_end_listener.lines.emit(Rejected(first, error))
    assert front_end_listener.heard == {"one": [Rejected("a", error)], "two": []}


def test_calls_are_answered_to_the_line_that_asked(front_end_listener):
    for line in ("one", "two"):
        front_end_listener.lines.put(
            front_end_listener.line[line], Asked(front_end_listener.line[line], 7, "stats", ())
        )
    first, second = front_end_listener.told()
    assert (first.method, second.method) == ("stats", "stats")
    front_end_listener.lines.emit(Reply(second.call_id, "second"))
    front_end_listener.lines.close(front_end_listener.line["one"])
    front_end_listener.lines.emit(Reply(first.call_id, "first"))
    assert front_end_listener.heard["one"] == []
    [answer] = front_end_listener.heard["two"]
    assert (answer.number, bytes(answer.value)) == (7, encode("second"))


def test_request_that_can_not_be_read_is_refused_and_those_beside_it_are_not(front_end_listener):
    front_end_listener.lines.put(
        front_end_listener.line["one"], Request("bad", Raw(encode({"prompt_token_ids": ["a"]})))
    )
    front_end_listener.ask("one", "good")
    assert front_end_listener.told() == ["good"]
    [refused] = front_end_listener.heard["one"]
    assert refused.request_id == "bad"
    assert isinstance(refused.error, TypeError)


def test_each_line_hears_of_the_others_load_and_not_of_its_own(front_end_listener):
    front_end_listener.ask("one", "a", num_prompt=3, max_tokens=5)
    front_end_listener.ask("one", "b", num_prompt=2, max_tokens=1)
    names = front_end_listener.told()
    beats = [
        front_end_listener.lines.elsewhere(front_end_listener.line[line], 0.0) for line in ("one", "two")
    ]
    assert beats == [Beat(), Beat(0.0, num_running=0, num_waiting=2, outstanding_tokens=11)]
    front_end_listener.answer((names[0], 1, None))
    assert front_end_listener.lines.elsewhere(front_end_listener.line["two"], 1.5) == Beat(1.5, 1, 1, 7)
    front_end_listener.answer((names[0], 1, "stop"), (names[1], 1, "length"))
    assert front_end_listener.lines.elsewhere(front_end_listener.line["two"], 0.0) == Beat()


def test_all_are_told_that_the_engine_failed(front_end_listener):
    dead = Dead(EngineDeadError("it broke"))
    front_end_listener.lines.emit(dead)
    assert front_end_listener.heard == {"one": [dead], "two": [dead]}
