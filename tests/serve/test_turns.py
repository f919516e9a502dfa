"""Requests begin in turn: one in a turn of the event loop, of one client after another."""

from __future__ import annotations

import asyncio

from moe_lora.serve.turns import InTurn


def begun(clients: list[str | None], late: str) -> tuple[list[str | None], list[int]]:
    """Who begins in which order, and how many in each turn of the loop; `late` asks two turns later."""
    order: list[str | None] = []
    per_turn = [0]

    async def app(scope, receive, send) -> None:
        order.append(scope["client"] and scope["client"][0])
        per_turn[-1] += 1

    async def run() -> None:
        in_turn = InTurn(app)

        async def ask(client: str | None) -> None:
            scope = {"type": "http", "client": None if client is None else (client, 1)}
            await in_turn(scope, None, None)

        asked = [asyncio.ensure_future(ask(client)) for client in clients]
        for turn in range(3 * len(clients)):
            if turn == 2:
                asked.append(asyncio.ensure_future(ask(late)))
            await asyncio.sleep(0)
            per_turn.append(0)
        await asyncio.gather(*asked)

    asyncio.run(run())
    return order, per_turn


def test_one_begins_in_a_turn_and_a_client_with_one_does_not_wait_for_anothers_many():
    order, per_turn = begun(["10.0.0.1"] * 100, "10.0.0.2")
    assert len(order) == 101
    assert max(per_turn) == 1
    assert order.index("10.0.0.2") <= 5


def test_clients_begin_one_after_another_and_those_of_a_socket_are_one():
    order, _ = begun([None] * 5 + ["10.0.0.1"] * 5 + ["10.0.0.2"] * 5, "10.0.0.3")
    assert sorted(order[:5], key=str) != [None] * 5
    assert order.index("10.0.0.3") <= 7
    assert [order.count(one) for one in (None, "10.0.0.1", "10.0.0.2")] == [5, 5, 5]


def test_one_whose_client_has_left_costs_no_turn():
    async def run() -> list[int]:
        begun: list[int] = []

        async def app(scope, receive, send) -> None:
            begun.append(scope["number"])

        in_turn = InTurn(app)
        asked = [
            asyncio.ensure_future(in_turn({"type": "http", "client": ("a", 1), "number": number}, None, None))
            for number in range(4)
        ]
        await asyncio.sleep(0)
        asked[1].cancel()
        asked[2].cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(0)
        await in_turn({"type": "http", "client": ("a", 1), "number": 4}, None, None)
        return begun

    assert asyncio.run(run()) == [0, 3, 4]
