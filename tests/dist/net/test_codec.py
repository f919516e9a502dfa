# SPDX-License-Identifier: Apache-2.0
"""What a frame can and can't become."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import msgspec
import pytest

from moe_lora.core.errors import AdapterNotFoundError, ConfigError, MoeLoraError
from moe_lora.dist.net.codec import FailureFrame, Interface, decoder_of, encode

from .parts import CALLS, Note, Secret

TAKES_NOTES = decoder_of([Note])


def test_message_comes_back_as_it_was():
    assert TAKES_NOTES(encode(Note(3, "ü"))) == Note(3, "ü")


def test_type_that_the_link_does_not_list_is_refused():
    with pytest.raises(msgspec.DecodeError, match="Secret"):
        TAKES_NOTES(encode(Secret("x")))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"\xff" * 100,
        pickle.dumps(Note),
        b"GET / HTTP/1.1\r\n\r\n",
        encode(Note(1))[:-1],
        encode(["Note"]),
        encode(["Note", "one", "text"]),
        encode({"Note": 1}),
        b"\x91" * 100_000,
    ],
)
def test_anything_else_is_refused(data):
    with pytest.raises(msgspec.DecodeError):
        TAKES_NOTES(data)


@pytest.mark.parametrize("error", [ConfigError("no"), AdapterNotFoundError("none"), ValueError("bad")])
def test_error_comes_back_as_its_kind_and_text(error):
    found = TAKES_NOTES(encode(FailureFrame(1, error))).error
    assert (type(found), str(found)) == (type(error), str(error))


def test_error_about_a_file_name_that_is_not_utf_8_is_sent_with_escapes():
    found = TAKES_NOTES(encode(FailureFrame(1, ValueError("found metr\udce9.gguf")))).error
    assert (type(found), str(found)) == (ValueError, r"found metr\udce9.gguf")


def test_error_of_a_kind_unknown_there_says_what_it_was():
    class OwnError(MoeLoraError):
        """Known here only."""

    class StrangeError(Exception):
        """Of no known kind."""

    assert type(TAKES_NOTES(encode(FailureFrame(1, OwnError("why")))).error) is MoeLoraError
    found = TAKES_NOTES(encode(FailureFrame(1, StrangeError("why")))).error
    assert isinstance(found, RuntimeError)
    assert "StrangeError: why" in str(found)


def test_a_failure_can_not_name_another_class():
    data = encode(["FailureFrame", 1, ["os.system", "true"]])
    assert str(TAKES_NOTES(data).error) == "os.system: true"


def test_object_that_is_no_plain_data_is_not_sent():
    with pytest.raises((TypeError, NotImplementedError)):
        encode(Note(1, object()))  # type: ignore[arg-type]


def test_arguments_are_what_the_method_takes():
    assert CALLS.args["double"](msgspec.Raw(encode((4,)))) == (4,)
    for wrong in (("four",), (), (1, 2)):
        with pytest.raises(msgspec.DecodeError):
            CALLS.args["double"](msgspec.Raw(encode(wrong)))


def test_interface_speaks_the_data_classes_of_its_annotations():
    @dataclass(frozen=True)
    class JobPlace:
        name: str
        parts: tuple[int, ...] = ()

    class Methods:
        def move(self, place: JobPlace, names: frozenset[str]) -> dict[str, JobPlace]: ...

    Methods.move.__annotations__ = {"place": JobPlace, "names": frozenset[str], "return": dict[str, JobPlace]}
    interface, place = Interface(Methods), JobPlace("a", (1, 2))
    assert interface.args["move"](msgspec.Raw(encode((place, {"x"})))) == (place, frozenset("x"))
    assert interface.results["move"](msgspec.Raw(encode({"a": place}))) == {"a": place}
