# SPDX-License-Identifier: Apache-2.0
"""Messages as bytes: msgspec structs, tagged by name.

A frame becomes one of a link's listed types, or an error: received bytes can't name code to run.
"""

from __future__ import annotations

import inspect
import numbers
import typing
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeVar

import msgspec

from moe_lora.core import errors

MAX_FRAME_BYTES = 64 << 20
"""A longer frame ends the connection unread."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A message of a link, tagged by class name."""


class CallFrame(Message, frozen=True):
    """A call of a peer's method, replied under the same number."""

    number: int
    method: str
    args: msgspec.Raw


class AnswerFrame(Message, frozen=True):
    number: int
    value: msgspec.Raw


class FailureFrame(Message, frozen=True):
    number: int
    error: Exception


FRAMES = (CallFrame, AnswerFrame, FailureFrame)
_KINDS: dict[str, type[Exception]] = {
    **{
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.MoeLoraError)
    },
    **{kind.__name__: kind for kind in (ValueError, KeyError, TypeError, OSError, TimeoutError)},
}


def _to_plain(value: Any) -> Any:
    if isinstance(value, Exception):
        known = (kind.__name__ for kind in type(value).__mro__ if kind.__name__ in _KINDS)
        # File names in a text may be no UTF-8.
        text = str(value).encode("utf-8", "backslashreplace").decode()
        return (next(known, type(value).__name__), text)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise NotImplementedError(f"{type(value).__name__} can't be sent")


def _from_plain(kind: type, value: Any) -> Any:
    if kind is Exception:
        name, text = msgspec.convert(value, tuple[str, str])
        known = _KINDS.get(name)
        return RuntimeError(f"{name}: {text}") if known is None else known(text)
    raise NotImplementedError(f"{kind} can't be received")


encode = msgspec.msgpack.Encoder(enc_hook=_to_plain).encode
"""A message or value as bytes.  Raises TypeError for unsupported values."""


class Decoder:
    """Decodes bytes into one of these types.  Raises msgspec.DecodeError."""

    def __init__(self, types: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(types, dec_hook=_from_plain)

    def __call__(self, data: bytes | msgspec.Raw) -> Any:
        try:
            return self._decoder.decode(data)
        except RecursionError as error:
            raise msgspec.DecodeError("nested too deeply") from error


def decoder_of(kinds: Iterable[type[Message]]) -> Decoder:
    """A decoder of these messages, calls and answers."""
    union: Any = None
    for kind in (*FRAMES, *kinds):
        union = kind if union is None else union | kind
    assert isinstance(union, UnionType)
    return Decoder(union)


Method = TypeVar("Method", bound=Callable[..., Any])


def verb(method: Method) -> Method:
    """Mark a method for calls by name."""
    method.is_verb = True  # type: ignore[attr-defined]
    return method


def verbs_of(part: Any) -> dict[str, Callable[..., Any]]:
    """The marked methods of an object or class, by name."""
    kind = part if isinstance(part, type) else type(part)
    found = (name for name, method in vars(kind).items() if getattr(method, "is_verb", False))
    return {name: getattr(part, name) for name in found}


class Interface:
    """Methods of one end of a link; annotations give the types.

    methods: functions by name, or a class with public methods alone.  A generator's or future's result is its
    value.
    """

    def __init__(self, methods: type | Mapping[str, Callable[..., Any]]) -> None:
        if isinstance(methods, type):
            found = inspect.getmembers(methods, inspect.isfunction)
            methods = {name: method for name, method in found if not name.startswith("_")}
        self._signatures: dict[str, inspect.Signature] = {}
        self.args: dict[str, Decoder] = {}
        self.results: dict[str, Decoder] = {}
        for name, method in methods.items():
            hints = typing.get_type_hints(method)
            result = hints.pop("return")
            if typing.get_origin(result) in (Generator, Future):
                result = typing.get_args(result)[-1]
            parameters = list(inspect.signature(method).parameters.values())[1:]
            kinds = tuple(hints[one.name] for one in parameters)
            self._signatures[name] = inspect.Signature(parameters)
            self.args[name] = Decoder(tuple[kinds] if kinds else tuple[()])  # type: ignore[valid-type]
            self.results[name] = Decoder(result)

    def __contains__(self, method: str) -> bool:
        return method in self.args

    def bind(self, method: str, args: tuple[Any, ...], words: Mapping[str, Any]) -> tuple[Any, ...]:
        """All arguments of a call in order, with defaults.

        Raises ValueError for an unknown method, TypeError for unsuitable arguments.
        """
        signature = self._signatures.get(method)
        if signature is None:
            raise ValueError(f"{method!r} is no method here; choose one of {', '.join(sorted(self.args))}")
        try:
            bound = signature.bind(*args, **words)
        except TypeError as error:
            raise TypeError(f"{method}{signature} does not take these arguments: {error}") from None
        bound.apply_defaults()
        return bound.args


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """One end's view of a link: messages, own methods, the peer's."""

    receives: Decoder
    answers: Interface | None = None
    asks: Interface | None = None

    @staticmethod
    def of(
        *receives: type[Message], answers: Interface | None = None, asks: Interface | None = None
    ) -> Protocol:
        return Protocol(receives=decoder_of(receives), answers=answers, asks=asks)
