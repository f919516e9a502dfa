"""Packed adapters as files that all processes of a host map: one copy in memory, however many read it."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moe_lora.core.errors import AdapterError, StorageError
from .packed import PackedAdapter, PackedLayer

logger = logging.getLogger(__name__)

_SUFFIX = ".packed.safetensors"


class HostStore:
    """Adapters by content hash in one directory.

    A file appears under its name only when it is whole, so that several writers and a crash do no harm.  A
    file that is lost is written again by whoever has it mapped.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._mapped: WeakValueDictionary[str, PackedAdapter] = WeakValueDictionary()
        """What was given out and is in use: a file that is removed stays mapped."""

    def path(self, content_hash: str) -> Path:
        """Where the adapter of this hash lies, or would lie."""
        return self.directory / f"{content_hash}{_SUFFIX}"

    def __contains__(self, content_hash: str) -> bool:
        return self.path(content_hash).exists()

    def restore(self, content_hash: str) -> bool:
        """Whether the adapter is there; one that is lost and mapped here is written again.

        Raises StorageError if there is no room.
        """
        if content_hash in self:
            return True
        packed = self._mapped.get(content_hash)
        if packed is None:
            return False
        logger.warning("%s was lost, and is written again", self.path(content_hash))
        self.put(packed)
        return True

    def put(self, packed: PackedAdapter) -> None:
        """Write the adapter unless it is there.  Raises StorageError if there is no room."""
        path = self.path(packed.content_hash)
        if path.exists():
            return
        tensors: dict[str, torch.Tensor] = {}
        for number, layer in enumerate(packed.layers):
            tensors |= {
                f"{number}.data": layer.data,
                f"{number}.table": layer.table,
                f"{number}.scale": layer.scale,
            }
        facts = {"max_lora_rank": packed.max_lora_rank, "nbytes": packed.nbytes, "targets": packed.targets}
        metadata = {"adapter": json.dumps(facts), "layers": str(len(packed.layers))}
        with self._appearing(path) as partial:
            save_file(tensors, partial, metadata=metadata)

    def adopt(self, content_hash: str, blocks: Iterable[bytes]) -> None:
        """Write the file of this hash from the bytes of another store's.  Raises StorageError likewise."""
        with self._appearing(self.path(content_hash)) as partial, partial.open("wb") as file:
            for block in blocks:
                file.write(block)

    @contextmanager
    def _appearing(self, path: Path) -> Iterator[Path]:
        """A file to write that takes the name `path` when it is whole."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)  # it may have been removed as a whole
            handle, name = tempfile.mkstemp(dir=self.directory, suffix=".partial")
            os.close(handle)
            try:
                yield Path(name)
                os.replace(name, path)
            finally:
                Path(name).unlink(missing_ok=True)
        except (OSError, SafetensorError) as error:
            raise StorageError(
                f"an adapter can't be kept in {self.directory} ({error}); free room there, or let "
                "state_dir or TMPDIR name another place"
            ) from error

    def get(self, content_hash: str, name: str) -> PackedAdapter:
        """The adapter of this hash, its tensors mapped from the file.

        Raises AdapterError if the file is missing, and nowhere mapped here, or damaged.
        """
        path = self.path(content_hash)
        mapped = self._mapped.get(content_hash)
        if mapped is not None and not path.exists():
            return replace(mapped, name=name)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                facts = json.loads(metadata["adapter"])
                layers = tuple(
                    PackedLayer(
                        data=file.get_tensor(f"{number}.data"),
                        table=file.get_tensor(f"{number}.table"),
                        scale=file.get_tensor(f"{number}.scale"),
                    )
                    for number in range(int(metadata["layers"]))
                )
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise AdapterError(f"{path}: not a packed adapter that can be read ({error})") from error
        packed = self._mapped[content_hash] = PackedAdapter(
            name=name,
            layers=layers,
            max_lora_rank=facts["max_lora_rank"],
            nbytes=facts["nbytes"],
            content_hash=content_hash,
            targets=tuple(facts["targets"]),
        )
        return packed

    def remove(self, content_hash: str) -> None:
        """Forget the adapter; processes that have it mapped keep it."""
        self.path(content_hash).unlink(missing_ok=True)
