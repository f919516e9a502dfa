# SPDX-License-Identifier: Apache-2.0
"""Packed adapters as files, mapped by a host's processes."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moe_lora.core.errors import AdapterError, StorageError
from moe_lora.core.host import OwnFolder, sweep_folders
from moe_lora.core.request import AdapterFacts
from moe_lora.core.shape import MATRIX_ALIGN_BYTES

from .packed import PackedAdapter, PackedLayer, content_hash

logger = logging.getLogger(__name__)

_SUFFIX, _PARTIAL = ".packed.safetensors", "partial-"
_PARTS = ("data", "table", "scale")
_SWEEP_S, _KEPT_S = 3600.0, 24 * 3600.0


class HostStore:
    """Adapters by content hash in one directory.

    Only whole files get their name, so concurrent writers and crashes are safe.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        sweep_folders(self.directory, _PARTIAL)
        self._mapped: WeakValueDictionary[int, PackedAdapter] = WeakValueDictionary()
        """Adapters in use, by id: a removed file stays mapped."""
        self.used: Callable[[], Iterable[str]] = tuple
        """Content hashes in use without a mapping."""
        self.sweep_s = time.time() + _SWEEP_S
        """Time of the next `remove_unused`: by then a returned instance has its adapters."""

    def path(self, content_hash: str) -> Path:
        """Path of this hash, present or not."""
        return self.directory / f"{content_hash}{_SUFFIX}"

    def __contains__(self, content_hash: str) -> bool:
        return self.path(content_hash).exists()

    def find(self, prefix: str) -> str:
        """The full content hash with this prefix.  Raises AdapterError."""
        for path in self.directory.glob(f"{prefix}*{_SUFFIX}"):
            return path.name.removesuffix(_SUFFIX)
        mapped = self._in_use(prefix)
        if mapped is None:
            raise AdapterError(f"{self.directory} has no adapter {prefix}…")
        return mapped.content_hash

    def _in_use(self, prefix: str) -> PackedAdapter | None:
        return next((one for one in self._mappings() if one.content_hash.startswith(prefix)), None)

    def _mappings(self) -> Iterator[PackedAdapter]:
        return (packed for one in self._mapped.valuerefs() if (packed := one()) is not None)

    def restore(self, content_hash: str) -> bool:
        """True if present; a lost file is written again from a mapping.  Raises StorageError."""
        if (path := self.path(content_hash)).exists():
            _touch(path)
            return True
        packed = self._in_use(content_hash)
        if packed is None:
            return False
        logger.warning("%s was lost, and is written again", path)
        self.put(packed)
        return True

    def put(self, packed: PackedAdapter) -> bool:
        """Write the adapter; False if present, unread.  Raises StorageError."""
        if (path := self.path(packed.content_hash)).exists():
            _touch(path)
            return False
        tensors = {
            f"{number}.{part}": getattr(layer, part)
            for number, layer in enumerate(packed.layers)
            for part in _PARTS
        }
        facts = {"max_lora_rank": packed.max_lora_rank, "nbytes": packed.nbytes, "targets": packed.targets}
        facts |= {key: getattr(packed, key) for key in ("invocation", "has_columns") if getattr(packed, key)}
        metadata = {"adapter": json.dumps(facts), "layers": str(len(packed.layers))}
        with self._appearing(path) as partial, self._explained():
            save_file(tensors, partial, metadata=metadata)
        return True

    def adopt(self, content_hash: str, blocks: Iterable[bytes]) -> None:
        """Write the file of this hash from another store's bytes.

        Raises StorageError; errors of `blocks` pass.
        """
        if time.time() >= self.sweep_s:
            self.remove_unused()
        with self._appearing(self.path(content_hash)) as partial:
            for block in blocks:
                with self._explained(), partial.open("ab") as file:
                    file.write(block)

    @contextmanager
    def _appearing(self, path: Path) -> Iterator[Path]:
        """A temporary file, renamed to `path` once whole."""
        with ExitStack() as stack:
            with self._explained():
                self.directory.mkdir(parents=True, exist_ok=True)
                # A locked folder marks a write in progress; the library may choose a temporary name inside.
                folder = stack.enter_context(OwnFolder(self.directory, _PARTIAL))
            yield folder / path.name
            with self._explained(), (folder / path.name).open("rb+") as file:
                # Else a power cut may leave the name with other bytes.
                os.fsync(file.fileno())
                os.replace(file.name, path)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            logger.error("%s can't be written: %s", self.directory, error)
            problem = (error.strerror if isinstance(error, OSError) else None) or error
            raise StorageError(
                f"an adapter can't be kept on this host ({problem}); free room there, or let state_dir or "
                "TMPDIR name another place"
            ) from error

    def get(self, content_hash: str, name: str) -> PackedAdapter:
        """The adapter of this hash, mapped from the file.

        Raises AdapterError; StorageError if the process can't map it now.
        """
        path = self.path(content_hash)
        _touch(path)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                facts = json.loads(metadata["adapter"])
                layers = tuple(
                    PackedLayer(**{part: file.get_tensor(f"{number}.{part}") for part in _PARTS})
                    for number in range(int(metadata["layers"]))
                )
            facts |= {key: tuple(facts[key]) for key in ("targets", "invocation") if key in facts}
            packed = PackedAdapter(name=name, layers=layers, content_hash=content_hash, **facts)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            mapped = self._in_use(content_hash)
            # The file is whole, unless it is deleted between its header and its data.
            if mapped is None and isinstance(error, (OSError, RuntimeError)) and path.exists():
                raise StorageError(f"{path.name} can't be mapped now: {error}") from error
            if mapped is None:
                raise AdapterError(f"{path.name}: not a packed adapter that can be read ({error})") from error
            packed = replace(mapped, name=name)
        self._mapped[id(packed)] = packed
        return packed

    def remove(self, content_hash: str) -> None:
        """Delete the file; mappings stay valid."""
        try:
            self.path(content_hash).unlink(missing_ok=True)
        except OSError as error:
            logger.error("a packed adapter stays on this host: %s", error)

    def remove_unused(self, used: Iterable[str] = ()) -> None:
        """Delete files that no process used within a day.  used: content hashes used now."""
        mapped = (one.content_hash for one in self._mappings())
        now_s, kept = time.time(), {*map(self.path, chain(used, self.used(), mapped))}
        self.sweep_s = now_s + _SWEEP_S
        for path in self.directory.glob(f"*{_SUFFIX}"):
            with suppress(OSError):  # removed meanwhile
                if path in kept:
                    _touch(path)
                elif path.stat().st_mtime < now_s - _KEPT_S:
                    path.unlink()


def _touch(path: Path) -> None:
    with suppress(OSError):  # another user's
        os.utime(path)


_TABLE, _SCALE = torch.int64, torch.float32
_SHARED = (
    *("name", "content_hash", "max_lora_rank", "nbytes", "targets", "invocation", "has_columns"),
    *("shard_elements", "of_ranks"),
)


@dataclass(frozen=True)
class WindowLayout:
    """Byte offsets of an adapter in memory: tables, scales, then each layer's data.

    Parts start at multiples of 64 bytes.  data: (start, length) per layer.
    """

    scales: int
    head_bytes: int
    data: tuple[tuple[int, int], ...]
    num_bytes: int


def facts_of(packed: PackedAdapter) -> AdapterFacts:
    first = packed.layers[0]
    return AdapterFacts(
        **{name: getattr(packed, name) for name in _SHARED},
        dtype=str(first.data.dtype).removeprefix("torch."),
        num_entries=first.table.shape[0],
        layer_elements=tuple(layer.data.numel() for layer in packed.layers),
    )


def layout_of(facts: AdapterFacts) -> WindowLayout:
    """The layout of an adapter's parts."""
    num_layers, itemsize = len(facts.layer_elements), getattr(torch, facts.dtype).itemsize
    scales = _up(num_layers * facts.num_entries * 3 * _TABLE.itemsize)
    end = head_bytes = scales + _up(num_layers * facts.num_entries * _SCALE.itemsize)
    data = []
    for num_elements in facts.layer_elements:
        data.append((end, num_elements * itemsize))
        end = _up(end + num_elements * itemsize)
    return WindowLayout(scales, head_bytes, tuple(data), end)


def _up(num_bytes: int) -> int:
    return -(-num_bytes // MATRIX_ALIGN_BYTES) * MATRIX_ALIGN_BYTES


def write_adapter(packed: PackedAdapter, memory: torch.Tensor) -> None:
    """Copy an adapter into `memory`, uint8 [layout.num_bytes]."""
    there = adapter_in(facts_of(packed), memory)
    for layer, place in zip(packed.layers, there.layers, strict=True):
        for part in _PARTS:
            getattr(place, part).copy_(getattr(layer, part))


def adapter_in(facts: AdapterFacts, memory: torch.Tensor) -> PackedAdapter:
    """The adapter in `memory`, uint8 [layout.num_bytes], without a copy."""
    layout = layout_of(facts)
    tables, scales = _head(facts, memory[: layout.head_bytes])
    dtype = getattr(torch, facts.dtype)
    data = [memory[start : start + length].view(dtype) for start, length in layout.data]
    return _adapter(facts, data, tables, scales)


def adapter_without_data(facts: AdapterFacts, head: torch.Tensor | None = None) -> PackedAdapter:
    """An adapter with data tensors on the device "meta".

    head: uint8 [layout.head_bytes]; None: absent too.
    """
    if head is None:
        shape = (len(facts.layer_elements), facts.num_entries)
        tables = torch.empty(*shape, 3, dtype=_TABLE, device="meta")
        scales = torch.empty(shape, dtype=_SCALE, device="meta")
    else:
        tables, scales = _head(facts, head)
    # Layers of equal size share a meta tensor.
    dtype = getattr(torch, facts.dtype)
    empty = {size: torch.empty(size, dtype=dtype, device="meta") for size in set(facts.layer_elements)}
    return _adapter(facts, [empty[size] for size in facts.layer_elements], tables, scales)


def has_data(packed: PackedAdapter) -> bool:
    """True if the bytes are here."""
    return not packed.layers[0].data.is_meta


def without_data(packed: PackedAdapter) -> PackedAdapter:
    """The adapter without data; copies tables and scales."""
    bare = adapter_without_data(facts_of(packed))
    layers = [
        replace(empty, table=layer.table.clone(), scale=layer.scale.clone())
        for empty, layer in zip(bare.layers, packed.layers, strict=True)
    ]
    return replace(bare, layers=tuple(layers))


def is_intact(packed: PackedAdapter) -> bool:
    """True if the bytes match the adapter's hash."""
    return content_hash(packed.layers, packed.invocation) == packed.content_hash


def _head(facts: AdapterFacts, head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[L, X, 3] tables and [L, X] scales of L layers, as views."""
    num_layers, num_entries = len(facts.layer_elements), facts.num_entries
    scales_start = layout_of(facts).scales
    tables = head[: num_layers * num_entries * 3 * _TABLE.itemsize].view(_TABLE)
    scales = head[scales_start : scales_start + num_layers * num_entries * _SCALE.itemsize].view(_SCALE)
    return tables.view(num_layers, num_entries, 3), scales.view(num_layers, num_entries)


def _adapter(
    facts: AdapterFacts, data: list[torch.Tensor], tables: torch.Tensor, scales: torch.Tensor
) -> PackedAdapter:
    layers = tuple(
        PackedLayer(data=one, table=table, scale=scale)
        for one, table, scale in zip(data, tables, scales, strict=True)
    )
    return PackedAdapter(layers=layers, **{name: getattr(facts, name) for name in _SHARED})
