# SPDX-License-Identifier: Apache-2.0
"""Adapters in object storage by fsspec: `s3://bucket/folder`, `gs://bucket/folder`."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from moe_lora.core.errors import AdapterError

from . import check_files, unreachable


def fetch(address: str, cache: Path, max_bytes: int) -> Path:
    """The folder of an adapter's files, below `cache`: one folder per state of the source.

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
    names, state = _state(system, root, address, max_bytes)
    place = cache / "objects" / hashlib.sha256(f"{address} {state}".encode()).hexdigest()
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=place.parent, prefix=".partial-"))
    try:
        for name in names:
            system.get_file(f"{root}/{name}", str(partial / name))
        if _state(system, root, address, max_bytes)[1] != state:
            raise AdapterError(f"{address} changed during the transfer; load the adapter again")
        try:
            os.rename(partial, place)
        except OSError:
            if not place.is_dir():  # another thread was first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return place


def _state(system: Any, root: str, address: str, max_bytes: int) -> tuple[list[str], str]:
    """Names to fetch, and the files' state."""
    system.invalidate_cache()
    entries = {
        os.path.basename(one["name"]): one for one in system.ls(root, detail=True) if one["type"] == "file"
    }
    if not entries:  # some versions of fsspec list a missing folder as empty
        raise FileNotFoundError(root)
    sizes = {name: one.get("size") for name, one in entries.items()}
    names = check_files(address, sizes, max_bytes)
    stamps = ("ETag", "etag", "generation", "LastModified", "mtime", "created")
    return names, repr(
        [(name, sizes[name], *(str(entries[name].get(one)) for one in stamps)) for name in names]
    )
