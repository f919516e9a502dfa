"""Makes a transport by name, and tells which ones this installation has."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from .contract import Store, Transport

_PLACES = {
    "shm": ("shm", "ShmTransport"),
    "gloo": ("gloo", "GlooTransport"),
    "nixl": ("nixl", "NixlTransport"),
}
KINDS = tuple(_PLACES)


def make_transport(kind: str, *, name: str, store: Store | None = None, **options: Any) -> Transport:
    """One process's end of a transport.

    kind: one of KINDS.  name: unique in the cluster, such as "server/3"; a process that returns after a crash
    uses its old name.  store: where windows are published; without one, peers `attach` by descriptors.
    options: those of the kind's class.
    Raises ValueError for an unknown kind.
    """
    if kind not in _PLACES:
        raise ValueError(f"transport {kind!r} is unknown; choose one of {', '.join(_PLACES)}")
    module, class_name = _PLACES[kind]
    return getattr(importlib.import_module(f".{module}", __package__), class_name)(
        name=name, store=store, **options
    )
