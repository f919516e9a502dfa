# SPDX-License-Identifier: Apache-2.0
"""What the tests share of reading endpoints mixes up no two kinds of functions."""

from __future__ import annotations

import functools

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from .conftest import _SameCode


def wrapped(call):
    """`call` behind a wrapper whose code is the same for each."""

    @functools.wraps(call)
    def wrapper(*args, **options):
        return call(*args, **options)

    return wrapper


def in_turn() -> str:
    return "in turn"


async def at_once() -> str:
    return "at once"


@pytest.mark.parametrize("depth", [1, 2])
def test_equal_wrappers_of_a_sync_and_an_async_function_are_two_kinds(depth):
    for call in (in_turn, at_once):
        expected = call.__name__.replace("_", " ")
        for _ in range(depth):
            call = wrapped(call)
        app = FastAPI()
        app.get("/path")(call)
        assert TestClient(app).get("/path").json() == expected


def test_functions_of_one_code_are_of_one_kind():
    one, other = (wrapped(wrapped(lambda: 1)) for _ in range(2))
    assert _SameCode(one) == _SameCode(other)
    assert hash(_SameCode(one)) == hash(_SameCode(other))
