# SPDX-License-Identifier: Apache-2.0
"""A CUDA device for tests where there is none: tensors that say they are on it and lie in host memory.

What the package computes on CUDA runs as it is, its Triton kernels in the interpreter
(TRITON_INTERPRET=1).  Any read of such a tensor by the host raises `HostRead`, and so does a copy to the
device from memory that is not page-locked: on a GPU each of them waits for the device.  `launches` notes
what a GPU would launch, and can do it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from moe_lora.kernels import ops
from moe_lora.kernels.triton import configs

CUDA = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_READS = {
    *("item", "_local_scalar_dense", "is_nonzero", "equal", "allclose", "nonzero", "argwhere"),
    *("masked_select", "bincount", "unique_dim", "_unique2", "unique_consecutive"),
}
"""Operations of which the host learns a value, or a size that depends on values."""
_METHODS = {"item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}


class HostRead(AssertionError):
    """The host waited for the device."""


class Launch(NamedTuple):
    """What a GPU would launch.  operation: of ours that it belongs to, "" outside of one.  again: does it
    once more, on the same memory and with the same numbers, as a graph's replay does."""

    name: str
    operation: str
    again: Callable[[], Any]


_noted: list[Launch] | None = None
_operation = ""


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """What is launched within the context, in order."""
    global _noted
    before, _noted = _noted, []
    try:
        yield _noted
    finally:
        _noted = before


def noting() -> bool:
    """Whether what is launched is noted now."""
    return _noted is not None


def _note(name: str, again: Callable[[], Any]) -> None:
    if _noted is not None:
        _noted.append(Launch(name, _operation, again))


def _note_into(name: str, out: Any, make: Callable[[], Any]) -> None:
    """Note a launch whose results lie in `out`, tensors that nothing else had before."""

    def again() -> None:
        for old, new in zip(tree_leaves(out), tree_leaves(make()), strict=True):
            if isinstance(old, torch.Tensor):
                old.copy_(new)

    if not name.startswith(("empty", "new_empty")):
        _note(name, again)


class DeviceTensor(torch.Tensor):
    """A tensor of the stand-in.  held: its values."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> DeviceTensor:
        about = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, device=CUDA, **about)

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "moe_lora":
            with StandIn(), _within(func._schema.name.partition("::")[2]):
                return implementation(func)(*args, **kwargs)
        _refuse_reads(func, args, kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with _Factories():
                return func.decompose(*args, **kwargs)
        kwargs = {name: _CPU if name == "device" else value for name, value in kwargs.items()}
        held = tree_map(_held, args), tree_map(_held, kwargs)
        out = func(*held[0], **held[1])
        _note_operation(func, held, out)
        known = {id(one.held): one for one in args if isinstance(one, DeviceTensor)}
        return tree_map(lambda one: known[id(one)] if id(one) in known else to_device(one), out)


class _Factories(TorchDispatchMode):
    """Tensors that torch's own operations made of others make on their device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")) and not any(isinstance(one, DeviceTensor) for one in args):
            return _made(func, args, kwargs)
        return func(*args, **kwargs)


def _made(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DeviceTensor:
    """What a factory makes on the device."""
    make = partial(func, *args, **{**kwargs, "device": _CPU})
    out = make()
    _note_into(func.__name__, out, make)
    return to_device(out)


@contextmanager
def _within(operation: str) -> Iterator[None]:
    global _operation
    before, _operation = _operation, operation
    try:
        yield
    finally:
        _operation = before


def _note_operation(func: Any, held: tuple[Any, Any], out: Any) -> None:
    name, call = func._schema.name.partition("::")[2], partial(func, *held[0], **held[1])
    returned = [one.alias_info for one in func._schema.returns]
    if any(one is not None and one.is_write for one in returned):
        _note(name, call)
    elif not any(returned):
        _note_into(name, out, call)


def implementation(func: Any) -> Any:
    """What the operation does, as it is registered."""
    name = func._schema.name.partition("::")[2]
    return next(does for schema, (does, _) in ops._OPS.items() if schema.partition("(")[0] == name)


def to_device(one: Any) -> Any:
    """The tensor as one of the stand-in; anything else as it is."""
    return DeviceTensor(one) if isinstance(one, torch.Tensor) and not isinstance(one, DeviceTensor) else one


def _held(one: Any) -> Any:
    return one.held if isinstance(one, DeviceTensor) else one


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _refuse_reads(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = func._schema.name.partition("::")[2]
    if name in _READS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        raise HostRead(f"{func} tells the host values of a tensor on the device")
    if name in _INDEXED and any(
        one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]
    ):
        raise HostRead(f"{func} by a mask waits for the number of its rows")
    target = kwargs.get("device")
    if name in ("_to_copy", "to") and target is not None and not _is_cuda(target):
        raise HostRead(f"{func} copies from the device to the host")
    if any(isinstance(one, torch.Tensor) and not isinstance(one, DeviceTensor) and one.dim() for one in args):
        raise HostRead(f"{func} takes a tensor of the host beside one on the device")


_pinned: dict[int, torch.Tensor] = {}
"""Storages that stand for page-locked memory, by address; kept, so that no other takes the address."""


def _refuse_pageable(source: torch.Tensor, waits: bool) -> None:
    if waits:
        raise HostRead("a copy to the device without non_blocking waits for it")
    if source.untyped_storage().data_ptr() not in _pinned:
        raise HostRead("a copy to the device from memory that is not page-locked waits for it")


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    _pinned[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


class StandIn(TorchFunctionMode):
    """Calls of torch that name a CUDA device or page-locked memory, answered by the stand-in."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        if isinstance(first, DeviceTensor):
            if name in _METHODS:
                raise HostRead(f".{name}() of a tensor on the device")
            if name in ("__getitem__", "__setitem__"):
                return _indexed(name, *args)
            return _copied(*args, **kwargs) if name == "copy_" else func(*args, **kwargs)
        if name == "copy_" and isinstance(args[1], DeviceTensor):
            raise HostRead("a copy from the device to the host")
        if name == "pin_memory":
            return _pin(first.clone())
        if kwargs.pop("pin_memory", False):
            return _pin(func(*args, **kwargs))
        if name == "to" and any(_is_cuda(one) for one in (*args[1:], *kwargs.values()) if _names_device(one)):
            _refuse_pageable(first, not kwargs.get("non_blocking", False))
            return to_device(first.clone())
        if _is_cuda(kwargs.get("device")):
            if name == "tensor":
                raise HostRead("torch.tensor on the device copies from memory that is not page-locked")
            return _made(func, args, kwargs)
        return func(*args, **kwargs)


def _copied(tensor: DeviceTensor, source: torch.Tensor, non_blocking: bool = False) -> DeviceTensor:
    """torch's own way asks the driver for the device first, as does that of `_indexed`."""
    if not isinstance(source, DeviceTensor):
        _refuse_pageable(source, not non_blocking)
    copy = partial(tensor.held.copy_, _held(source))
    copy()
    _note("copy_", copy)
    return tensor


def _indexed(name: str, tensor: DeviceTensor, index: Any, *value: Any) -> Any:
    """Part of the tensor, or its assignment."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(one, (list, torch.Tensor)) and not isinstance(one, DeviceTensor) for one in parts):
        raise HostRead("indices on the host are copied to the device")
    if any(isinstance(one, DeviceTensor) and one.dtype in (torch.bool, torch.uint8) for one in parts):
        raise HostRead("indexing by a mask waits for the number of its rows")
    if any(isinstance(one, torch.Tensor) and not isinstance(one, DeviceTensor) for one in value):
        raise HostRead("a value on the host is copied to the device")
    act = partial(getattr(tensor.held, name), tree_map(_held, index), *map(_held, value))
    out = act()
    if name == "__setitem__":
        _note(name, act)
    elif any(isinstance(one, torch.Tensor) for one in parts):
        _note_into(name, out, act)
    return to_device(out)


def _names_device(one: Any) -> bool:
    return isinstance(one, (str, torch.device))


@contextmanager
def stand_in_device() -> Iterator[None]:
    """Kernels and allocations of the context are the stand-in's."""
    start = configs.start

    def start_on_host(kernel: Any, programs: int, *operands: Any, **meta: Any) -> None:
        held = tree_map(_held, operands)

        def again() -> None:
            with torch._C.DisableTorchFunction():
                start(kernel, programs, *held, **meta)

        again()
        _note(kernel.__name__, again)

    with (
        patch.object(configs, "start", start_on_host),
        patch.object(configs, "_device_facts", lambda device: ("stand-in", 2)),
        StandIn(),
    ):
        yield
