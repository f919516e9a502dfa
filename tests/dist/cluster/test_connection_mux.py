# SPDX-License-Identifier: Apache-2.0
"""Several connections to one loop: whose request is whose."""

from __future__ import annotations

import queue

import pytest
from msgspec import Raw

from moe_lora.core.errors import CapacityError, EngineDeadError
from moe_lora.core.request import (
    MAX_REPORT_BYTES,
    GenerateRequest,
    PromptReport,
    SamplingParams,
    TokenOutput,
)
from moe_lora.dist.cluster.instance_links import ConnectionMux
from moe_lora.dist.net.codec import MAX_FRAME_BYTES, encode
from moe_lora.dist.net.peer import Asked
from moe_lora.engine.client.messages import (
    Abort,
    Beat,
    Dead,
    DrainOrder,
    Generate,
    Inbox,
    Move,
    MoveOrder,
    Outputs,
    Rejected,
    Reply,
    Request,
)


class Connection:
    """One end of a connection; what it was sent."""

    max_bytes = MAX_FRAME_BYTES

    def __init__(self) -> None:
        self.heard: list = []

    def send(self, message) -> None:
        if len(encode(message)) > self.max_bytes:
            raise ValueError("too large")
        self.heard.append(message)


class TwoConnections:
    """A loop's inbox, and what came back over two connections."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.mux = ConnectionMux(self.inbox, max_model_len=64)
        self.connection = {name: Connection() for name in ("one", "two")}
        for connection in self.connection.values():
            self.mux.open(connection)

    @property
    def heard(self) -> dict[str, list]:
        return {name: connection.heard for name, connection in self.connection.items()}

    def ask(self, connection: str, request_id: str, num_prompt: int = 3, max_tokens: int = 5) -> None:
        request = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=(1,) * num_prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
        )
        self.mux.put(self.connection[connection], Request.of(request))

    def told(self) -> list:
        """What the loop is told, requests and calls by the names that it knows them by."""
        found = []
        while True:
            try:
                command, _ = self.inbox.get(timeout=0)
            except queue.Empty:
                return found
            found.append(command.request.request_id if isinstance(command, Generate) else command)

    def answer(self, *outputs: tuple[str, int, str | None]) -> None:
        self.mux.emit(
            Outputs([TokenOutput(request_id=name, token_ids=(token,), finish_reason=reason)
                     for name, token, reason in outputs])
        )  # fmt: skip

    def tokens(self, connection: str) -> list[tuple[str, int]]:
        return [
            (output.request_id, *output.token_ids)
            for event in self.heard[connection]
            if isinstance(event, Outputs)
            for output in event.outputs
        ]


@pytest.fixture
def two() -> TwoConnections:
    return TwoConnections()


def test_two_lines_may_use_the_same_ids(two):
    two.ask("one", "a")
    two.ask("two", "a")
    first, second = two.told()
    assert first == "a" != second
    two.answer((first, 1, None), (second, 2, None))
    two.answer((second, 3, "length"), (first, 4, "length"))
    assert two.tokens("one") == [("a", 1), ("a", 4)]
    assert two.tokens("two") == [("a", 2), ("a", 3)]


def test_experts_of_prompts_that_end_together_go_in_messages_of_their_own(two):
    experts = PromptReport(experts=(94, 8, bytes(MAX_REPORT_BYTES)))
    for request_id in ("a", "b", "c"):
        two.ask("one", request_id)
    outputs = [
        TokenOutput(request_id=name, token_ids=(1,), prompt=None if name == "b" else experts)
        for name in two.told()
    ]
    two.mux.emit(Outputs(outputs))
    assert sorted(two.tokens("one")) == [("a", 1), ("b", 1), ("c", 1)]
    assert max(len(encode(one)) for one in two.heard["one"]) < MAX_FRAME_BYTES


ROW = bytes(1400)


def test_reports_that_are_too_large_together_are_sent_apart(two):
    report = PromptReport(scores=(174, ROW * 5))
    two.connection["one"].max_bytes = 8000
    for request_id in ("a", "b", "c"):
        two.ask("one", request_id)
    first, *others = two.told()
    reports = [TokenOutput(request_id=name, token_ids=(1,), prompt=report) for name in others]
    two.mux.emit(Outputs([TokenOutput(request_id=first, token_ids=(1,)), *reports]))
    assert two.tokens("one") == [("a", 1), ("b", 1), ("c", 1)]
    two.answer((first, 2, None))
    assert len(two.heard["one"]) == 4


@pytest.mark.parametrize("reason", [None, "length"])
def test_report_that_is_too_large_for_a_message_ends_its_request_alone(two, reason):
    report = PromptReport(scores=(174, ROW * 10))
    two.connection["one"].max_bytes = 8000
    two.ask("one", "a")
    two.ask("one", "b")
    first, second = two.told()
    large = TokenOutput(request_id=first, token_ids=(1,), prompt=report, finish_reason=reason)
    two.mux.emit(Outputs([large, TokenOutput(request_id=second, token_ids=(1,))]))
    refused, output = two.heard["one"]
    assert (refused.request_id, type(refused.error)) == ("a", CapacityError)
    assert "fewer log probabilities" in str(refused.error)
    assert [one.request_id for one in output.outputs] == ["b"]
    assert two.told() == ([Abort(first)] if reason is None else [])


def test_closing_a_line_ends_its_requests_and_no_others(two):
    two.ask("one", "a")
    two.ask("two", "a")
    first, second = two.told()
    two.mux.close(two.connection["one"])
    assert two.told() == [Abort(first)]
    two.answer((first, 1, "abort"), (second, 2, "length"))
    assert two.tokens("one") == []
    assert two.tokens("two") == [("a", 2)]


def test_what_is_said_of_a_closed_lines_request_is_not_taken_for_a_later_ones(two):
    two.ask("one", "a")
    two.mux.close(two.connection["one"])
    two.ask("two", "a")
    first, abort, second = two.told()
    assert abort == Abort(first)
    two.answer((first, 1, "abort"))
    assert two.tokens("two") == []
    two.answer((second, 2, "length"))
    assert two.tokens("two") == [("a", 2)]


def test_id_that_is_used_again_after_an_abort_gets_the_later_requests_tokens(two):
    two.ask("one", "a")
    two.mux.put(two.connection["one"], Abort("a"))
    two.ask("one", "a")
    first, abort, second = two.told()
    assert abort == Abort(first)
    two.answer((second, 2, "length"), (first, 1, "abort"))
    assert two.tokens("one") == [("a", 2)]


def test_aborts_and_refusals_are_of_the_line_that_asked(two):
    two.ask("one", "a")
    two.ask("two", "a")
    first, second = two.told()
    two.mux.put(two.connection["two"], Abort("a"))
    two.mux.put(two.connection["two"], Abort("unknown"))
    assert two.told() == [Abort(second)]
    error = ValueError("too long")
    two.mux.emit(Rejected(first, error))
    assert two.heard == {"one": [Rejected("a", error)], "two": []}


def test_calls_are_answered_to_the_line_that_asked(two):
    for connection in ("one", "two"):
        two.mux.put(
            two.connection[connection],
            Asked(two.connection[connection], 7, "stats", ()),
        )
    first, second = two.told()
    assert (first.method, second.method) == ("stats", "stats")
    two.mux.emit(Reply(second.call_id, "second"))
    two.mux.close(two.connection["one"])
    two.mux.emit(Reply(first.call_id, "first"))
    assert two.heard["one"] == []
    [answer] = two.heard["two"]
    assert (answer.number, bytes(answer.value)) == (7, encode("second"))


def test_calls_about_a_request_reach_the_one_of_the_line_that_asked(two):
    two.ask("one", "r")
    two.ask("two", "r")
    first, second = two.told()
    for connection, name in (("two", second), ("one", first)):
        two.mux.put(
            two.connection[connection], Asked(two.connection[connection], 7, "hold_request", ("r", 2))
        )
        [call] = two.told()
        assert (call.method, call.args) == ("hold_request", (name, 2))
    stranger = Asked(two.connection["one"], 8, "hold_request", ("s", 0))
    two.mux.put(two.connection["one"], stranger)
    assert two.told() == []
    assert "not running here" in str(two.heard["one"][-1].error)


def test_orders_to_move_go_to_the_lines_that_have_the_requests(two):
    two.ask("one", "r")
    two.ask("two", "r")
    first, second = two.told()
    orders = [MoveOrder(second, "b", "kv"), MoveOrder(first, "c", "tokens"), MoveOrder("gone", "b", "kv")]
    two.mux.put(two.connection["one"], Asked(two.connection["one"], 7, "pass_on", (orders,)))
    assert two.told() == []
    assert two.heard["two"] == [Move("r", "b", "kv")]
    assert two.heard["one"][0] == Move("r", "c", "tokens")
    assert encode(2) == bytes(two.heard["one"][1].value)


def test_request_that_can_not_be_read_is_refused_and_those_beside_it_are_not(two):
    two.mux.put(two.connection["one"], Request("bad", Raw(encode({"prompt_token_ids": ["a"]}))))
    two.ask("one", "good")
    assert two.told() == ["good"]
    [refused] = two.heard["one"]
    assert refused.request_id == "bad"
    assert isinstance(refused.error, TypeError)


def test_each_line_hears_of_the_others_load_and_not_of_its_own(two):
    two.ask("one", "a", num_prompt=3, max_tokens=5)
    two.ask("one", "b", num_prompt=2, max_tokens=1)
    names = two.told()
    beats = [two.mux.elsewhere(two.connection[connection], 0.0) for connection in ("one", "two")]
    assert beats == [Beat(), Beat(0.0, num_running=0, num_waiting=2, outstanding_tokens=11)]
    two.answer((names[0], 1, None))
    assert two.mux.elsewhere(two.connection["two"], 1.5) == Beat(1.5, 1, 1, 7)
    two.answer((names[0], 1, "stop"), (names[1], 1, "length"))
    assert two.mux.elsewhere(two.connection["two"], 0.0) == Beat()


def test_all_are_told_that_the_engine_failed(two):
    dead = Dead(EngineDeadError("it broke"))
    two.mux.emit(dead)
    assert two.heard == {"one": [dead], "two": [dead]}


def test_the_later_drain_order_is_remembered_whoever_tells_it_first():
    two = TwoConnections()
    later, older = DrainOrder(True, 4), DrainOrder(False, 3)
    for number, (name, order) in enumerate((("one", later), ("two", older))):
        connection = two.connection[name]
        two.mux.put(connection, Asked(connection, number, "remember_drain", (order,)))
    assert two.mux.drain == later
