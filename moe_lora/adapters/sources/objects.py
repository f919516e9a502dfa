# SPDX-License-Identifier: Apache-2.0
"""Adapters in object storage by fsspec: `s3://bucket/folder`, `gs://bucket/folder`."""

from __future__ import annotations

import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from moe_lora.core.errors import AdapterError
from moe_lora.core.host import OwnFolder

from . import check_files, former, mark_used, remove_unused, unreachable


def fetch(address: str, cache: Path, max_bytes: int) -> Path:
    """The folder of an adapter's files, below `cache`, one for each state; removes the `former` states.

    Credentials are the storage library's (AWS_ACCESS_KEY_ID and others).  Raises AdapterError, also for
    changing files; PeerUnreachableError.
    """
    import fsspec

    scheme = address.partition("://")[0]
    try:
        system, root = fsspec.core.url_to_fs(address)
    except ImportError as error:
        raise AdapterError(f'{address} needs a package: pip install "moe-lora[{scheme}]"') from error
    try:
        return _fetched(system, root, address, cache, max_bytes)
    except FileNotFoundError as error:
        raise AdapterError(f"{address} does not exist, or the server's account may not list it") from error
    except PermissionError as error:
        raise AdapterError(f"{address}: the server's account may not read it") from error
    except AdapterError:
        raise
    except Exception as error:  # botocore's and gcsfs' errors have no common base
        raise unreachable(address, error) from error


def _fetched(system: Any, root: str, address: str, cache: Path, max_bytes: int) -> Path:
    sizes, state = _state(system, root, address, max_bytes)
    own, place_name = (hashlib.sha256(text.encode()).hexdigest() for text in (address, state))
    place = cache / "objects" / f"{own}-{place_name}"
    mark_used(place)
    if _is_whole(place, sizes):
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with OwnFolder(place.parent, ".partial-") as partial:
        for name in sizes:
            system.get_file(f"{root}/{name}", str(partial / name))
        if _state(system, root, address, max_bytes)[1] != state or not _is_whole(partial, sizes):
            raise AdapterError(f"{address} changed during the transfer; load the adapter again")
        with suppress(OSError):
            os.rename(partial, place)
        if not _is_whole(place, sizes):  # else another thread may have been first
            shutil.rmtree(place, ignore_errors=True)
            os.rename(partial, place)
    for one in former(place, place.parent.glob(f"{own}-*")):
        shutil.rmtree(one, ignore_errors=True)
    remove_unused(cache, max_bytes)
    return place


def _is_whole(place: Path, sizes: dict[str, int]) -> bool:
    """False if a file is absent, or has other bytes in number."""
    return all((place / name).is_file() and (place / name).stat().st_size == sizes[name] for name in sizes)


def _state(system: Any, root: str, address: str, max_bytes: int) -> tuple[dict[str, int], str]:
    """Sizes of the files to fetch, and their state."""
    system.invalidate_cache()
    entries = {
        os.path.basename(one["name"]): one for one in system.ls(root, detail=True) if one["type"] == "file"
    }
    if not entries:  # some versions of fsspec list a missing folder as empty
        raise FileNotFoundError(root)
    sizes = {name: one.get("size") for name, one in entries.items()}
    names = check_files(address, sizes, max_bytes)
    stamps = ("ETag", "etag", "generation", "LastModified", "mtime", "created")
    stamped = [(name, sizes[name], *(str(entries[name].get(one)) for one in stamps)) for name in names]
    return {name: sizes[name] for name in names}, repr(stamped)
