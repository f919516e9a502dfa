"""Several connections to one loop: whose request is whose."""

from __future__ import annotations

import queue

import pytest
from msgspec import Raw

from moe_lora.core.errors import EngineDeadError
from moe_lora.core.request import GenerateRequest, SamplingParams, TokenOutput
from moe_lora.dist.cluster.instance_links import Lines
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


class Line:
    """One end of a connection; what it was sent."""

    def __init__(self) -> None:
        self.heard: list = []

    def send(self, message) -> None:
        self.heard.append(message)


class Desk:
    """A loop's inbox, and what came back over two lines."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.lines = Lines(self.inbox, max_model_len=64)
        self.line = {name: Line() for name in ("one", "two")}
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
def desk() -> Desk:
    return Desk()


def test_two_lines_may_use_the_same_ids(desk):
    desk.ask("one", "a")
    desk.ask("two", "a")
    first, second = desk.told()
    assert first == "a" != second
    desk.answer((first, 1, None), (second, 2, None))
    desk.answer((second, 3, "length"), (first, 4, "length"))
    assert desk.tokens("one") == [("a", 1), ("a", 4)]
    assert desk.tokens("two") == [("a", 2), ("a", 3)]


def test_closing_a_line_ends_its_requests_and_no_others(desk):
    desk.ask("one", "a")
    desk.ask("two", "a")
    first, second = desk.told()
    desk.lines.close(desk.line["one"])
    assert desk.told() == [Abort(first)]
    desk.answer((first, 1, "abort"), (second, 2, "length"))
    assert desk.tokens("one") == []
    assert desk.tokens("two") == [("a", 2)]


def test_what_is_said_of_a_closed_lines_request_is_not_taken_for_a_later_ones(desk):
    desk.ask("one", "a")
    desk.lines.close(desk.line["one"])
    desk.ask("two", "a")
    first, abort, second = desk.told()
    assert abort == Abort(first)
    desk.answer((first, 1, "abort"))
    assert desk.tokens("two") == []
    desk.answer((second, 2, "length"))
    assert desk.tokens("two") == [("a", 2)]


def test_id_that_is_used_again_after_an_abort_gets_the_later_requests_tokens(desk):
    desk.ask("one", "a")
    desk.lines.put(desk.line["one"], Abort("a"))
    desk.ask("one", "a")
    first, abort, second = desk.told()
    assert abort == Abort(first)
    desk.answer((second, 2, "length"), (first, 1, "abort"))
    assert desk.tokens("one") == [("a", 2)]


def test_aborts_and_refusals_are_of_the_line_that_asked(desk):
    desk.ask("one", "a")
    desk.ask("two", "a")
    first, second = desk.told()
    desk.lines.put(desk.line["two"], Abort("a"))
    desk.lines.put(desk.line["two"], Abort("unknown"))
    assert desk.told() == [Abort(second)]
    error = ValueError("too long")
    desk.lines.emit(Rejected(first, error))
    assert desk.heard == {"one": [Rejected("a", error)], "two": []}


def test_calls_are_answered_to_the_line_that_asked(desk):
    for line in ("one", "two"):
        desk.lines.put(desk.line[line], Asked(desk.line[line], 7, "stats", ()))
    first, second = desk.told()
    assert (first.method, second.method) == ("stats", "stats")
    desk.lines.emit(Reply(second.call_id, "second"))
    desk.lines.close(desk.line["one"])
    desk.lines.emit(Reply(first.call_id, "first"))
    assert desk.heard["one"] == []
    [answer] = desk.heard["two"]
    assert (answer.number, bytes(answer.value)) == (7, encode("second"))


def test_request_that_can_not_be_read_is_refused_and_those_beside_it_are_not(desk):
    desk.lines.put(desk.line["one"], Request("bad", Raw(encode({"prompt_token_ids": ["a"]}))))
    desk.ask("one", "good")
    assert desk.told() == ["good"]
    [refused] = desk.heard["one"]
    assert refused.request_id == "bad"
    assert isinstance(refused.error, TypeError)


def test_each_line_hears_of_the_others_load_and_not_of_its_own(desk):
    desk.ask("one", "a", num_prompt=3, max_tokens=5)
    desk.ask("one", "b", num_prompt=2, max_tokens=1)
    names = desk.told()
    beats = [desk.lines.elsewhere(desk.line[line], 0.0) for line in ("one", "two")]
    assert beats == [Beat(), Beat(0.0, num_running=0, num_waiting=2, outstanding_tokens=11)]
    desk.answer((names[0], 1, None))
    assert desk.lines.elsewhere(desk.line["two"], 1.5) == Beat(1.5, 1, 1, 7)
    desk.answer((names[0], 1, "stop"), (names[1], 1, "length"))
    assert desk.lines.elsewhere(desk.line["two"], 0.0) == Beat()


def test_all_are_told_that_the_engine_failed(desk):
    dead = Dead(EngineDeadError("it broke"))
    desk.lines.emit(dead)
    assert desk.heard == {"one": [dead], "two": [dead]}
