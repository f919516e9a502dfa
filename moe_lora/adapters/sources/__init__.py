# SPDX-License-Identifier: Apache-2.0
"""Adapters on a hub or in object storage."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from moe_lora.adapters.peft.files import CONFIG_FILE, MLX_FILE, WEIGHTS_FILE
from moe_lora.core.errors import AdapterError, ConfigError, PeerUnreachableError

if TYPE_CHECKING:
    from moe_lora.config.cluster import ClusterConfig
    from moe_lora.config.optional_parts import SourcesConfig

SCHEMES = {"hf": ".hub", "s3": ".objects", "gs": ".objects"}
"""Scheme of an address → module with `fetch`, imported when used."""
FURTHER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "adapter_model.safetensors.index.json"),
)
"""Optional files of an adapter."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_ADDRESS = re.compile(r"(\w[\w+.-]*)://(.*)", re.DOTALL)
_MAX_CHARS = 1024
_KEPT_S = 24 * 3600
"""Files of a fetch stay this long: other servers of the folder may serve from there."""
_DIGEST = "[0-9a-f]" * 64
_KEPT_ADAPTERS = 16
"""Largest adapters that the files of all fetches may be, on half of the disk at most."""
MAX_FETCHES = 8
_FETCHES = threading.BoundedSemaphore(MAX_FETCHES)
"""Bounds threads that wait for slow sources."""


def scheme_of(path: str) -> str | None:
    """The scheme of an address; None for a path."""
    found = _ADDRESS.fullmatch(path)
    return None if found is None else found[1]


class AdapterSources:
    """Fetches adapters from allowed addresses (None: no address).  Thread-safe."""

    def __init__(self, config: SourcesConfig | None) -> None:
        self._config = config

    def local(self, path: str) -> str:
        """A folder for `path`: the path itself, or the copy of an address.

        `org/name` means `hf://org/name` if no such folder exists and the address is allowed.  Raises
        AdapterError; PeerUnreachableError for a silent source.
        """
        scheme = scheme_of(path)
        if scheme is None:
            address = None if self._config is None else hub_address(path, self._config.allow)
            return path if address is None else self._fetch("hf", address)
        if scheme not in SCHEMES:
            known = ", ".join(f"{one}://" for one in SCHEMES)
            raise AdapterError(
                f"{path!r}: no adapters come from {scheme}://; give a folder, or one of {known}"
            )
        if self._config is None:
            raise AdapterError(
                f"{path!r}: this server fetches no adapters; give a folder, or start the server with "
                f"--set sources.allow={scheme}://ORG/*"
            )
        path = path.rstrip("/")
        if not is_allowed(path, self._config.allow):
            allowed = ", ".join(self._config.allow)
            raise AdapterError(f"{path!r} is not allowed; sources.allow has {allowed}")
        return self._fetch(scheme, path)

    def _fetch(self, scheme: str, address: str) -> str:
        assert self._config is not None
        fetch: Callable[[str, Path, int], Path]
        fetch = import_module(SCHEMES[scheme], __name__).fetch
        if not _FETCHES.acquire(blocking=False):
            raise PeerUnreachableError(
                f"{address} can't be fetched now: {MAX_FETCHES} adapters are in transfer"
            )
        try:
            return str(fetch(address, self._config.place, int(self._config.max_gb * 1e9)))
        finally:
            _FETCHES.release()


def with_local_adapters(cluster: ClusterConfig) -> ClusterConfig:
    """The cluster, with fetched folders in place of addresses.  Raises ConfigError."""
    sources = AdapterSources(cluster.sources)
    try:
        adapters = tuple((name, sources.local(path)) for name, path in cluster.engine.adapters)
    except (AdapterError, PeerUnreachableError) as error:
        raise ConfigError(str(error)) from error
    return replace(cluster, engine=replace(cluster.engine, adapters=adapters))


def is_allowed(address: str, patterns: Iterable[str]) -> bool:
    """True if a pattern covers the address; hub addresses without revision and folder."""
    scheme, _, rest = address.partition("://")
    parts = rest.split("/")
    place = address if scheme != "hf" else f"hf://{'/'.join(parts[:2]).partition('@')[0]}"
    clean = len(address) <= _MAX_CHARS and address.isprintable() and not {"", ".", ".."} & set(parts)
    return clean and any(fnmatchcase(place, pattern) for pattern in patterns)


def hub_address(path: str, patterns: Iterable[str]) -> str | None:
    """The allowed hub address of `org/name`; None for another path or a present folder."""
    address = f"hf://{path}"
    is_name = _HUB_NAME.fullmatch(path) and not os.path.exists(path)
    return address if is_name and is_allowed(address, patterns) else None


def check_files(address: str, sizes: dict[str, int | None], max_bytes: int) -> list[str]:
    """The names to fetch.  sizes: bytes by name.  Raises AdapterError."""
    weights = [one for one in (WEIGHTS_FILE, MLX_FILE) if one in sizes] or [WEIGHTS_FILE]
    for name in (CONFIG_FILE, *weights):
        if name not in sizes:
            listed = ", ".join(sorted(sizes)[:10]) or "no files"
            hint = ""
            if name == WEIGHTS_FILE and "adapter_model.bin" in sizes:
                hint = "; adapter_model.bin is a pickle, which can run code, and is not read"
            raise AdapterError(f"{address} has no {name} (it has {listed}){hint}")
    names = [name for name in (CONFIG_FILE, *weights, *FURTHER) if name in sizes]
    unknown = [name for name in names if sizes[name] is None]
    if unknown:
        raise AdapterError(
            f"{address}: the source states no size of {unknown[0]}, so max_gb can't be checked"
        )
    total = sum(sizes[name] or 0 for name in names)
    if total > max_bytes:
        raise AdapterError(
            f"{address} has {total / 1e9:.2f} GB; the limit is sources.max_gb={max_bytes / 1e9:g}"
        )
    return names


def mark_used(folder: Path) -> None:
    """Note a use now, before a look at the files: another thread may remove unused files."""
    with suppress(OSError):  # absent, or of another owner
        os.utime(folder)


def former(folder: Path, folders: Iterable[Path]) -> list[Path]:
    """Mark `folder` as used; returns the folders neither used last before, nor within a day."""
    mark_used(folder)
    uses = [(used_s, one) for used_s, one in _uses(folders) if one != folder]
    return [one for used_s, one in uses[:-1] if used_s < time.time() - _KEPT_S]


def remove_unused(cache: Path, max_bytes: int) -> None:
    """Remove the longest ago fetched addresses' files beyond the bound, unless fetched within a day.

    Instances have copies of loaded adapters; a restart on another host needs the files.
    """
    left = min(_KEPT_ADAPTERS * max_bytes, shutil.disk_usage(cache).total // 2)
    for _, place in reversed(_uses(cache.glob(f"*/{_DIGEST}*"))):
        with suppress(OSError):  # removed meanwhile
            left -= sum(one.lstat().st_size for one in place.rglob("*"))
            # The time is read again: another thread may have fetched these files.
            if left < 0 and place.stat().st_mtime < time.time() - _KEPT_S:
                shutil.rmtree(place, ignore_errors=True)


def _uses(folders: Iterable[Path]) -> list[tuple[float, Path]]:
    """Times of last uses and folders, the longest unused first."""
    uses = list[tuple[float, Path]]()
    for one in folders:
        with suppress(OSError):  # removed meanwhile
            uses.append((one.stat().st_mtime, one))
    return sorted(uses)


def unreachable(address: str, error: Exception) -> PeerUnreachableError:
    """The error of a source that may answer later."""
    cause = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return PeerUnreachableError(f"{address} can't be fetched now: {cause}")
