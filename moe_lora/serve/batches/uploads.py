# SPDX-License-Identifier: Apache-2.0
"""Uploads: forms of type multipart/form-data with one file, received to disk."""

from __future__ import annotations

import mmap
import re
from email.parser import HeaderParser
from pathlib import Path
from typing import NamedTuple

from moe_lora.serve.http_errors import ApiError, bad_request

_BOUNDARY = re.compile(r'multipart/form-data\s*;.*?boundary="?([^";,]{1,70})"?', re.IGNORECASE)
_MAX_HEAD_BYTES = 8192
_MAX_PARTS = 17
_MAX_FIELD_BYTES = 1024
_WINDOW_BYTES = 1 << 20


class Form(NamedTuple):
    """fields: texts by name.  start, end: of the file's content."""

    fields: dict[str, str]
    filename: str
    start: int
    end: int


def boundary_of(content_type: str) -> bytes:
    """Raises ApiError for another type than a form."""
    found = _BOUNDARY.match(content_type.strip())
    if found is None:
        raise bad_request("the body must be a form, sent with Content-Type: multipart/form-data")
    return found[1].strip().encode("latin-1")


def read_form(path: Path, boundary: bytes) -> Form:
    """The form in a file.  Raises ApiError."""
    if not path.stat().st_size:
        raise _broken("is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as body:
        return _parts(body, b"--" + boundary)


def _parts(body: mmap.mmap, mark: bytes) -> Form:
    fields: dict[str, str] = {}
    found: tuple[str, int, int] | None = None
    place = body.find(mark, 0, _MAX_HEAD_BYTES)
    if place < 0:
        raise _broken("has no boundary")
    place += len(mark)
    num_parts = 0
    while body[place : place + 2] != b"--":
        num_parts += 1
        if num_parts > _MAX_PARTS:
            raise _broken(f"has more than {_MAX_PARTS} parts")
        start = body.find(b"\r\n\r\n", place, place + _MAX_HEAD_BYTES)
        end = _find(body, b"\r\n" + mark, start + 4) if start >= 0 else -1
        if end < 0:
            raise _broken("is cut short")
        head = HeaderParser().parsestr(body[place:start].decode("utf-8", "replace").lstrip())
        name = str(head.get_param("name", "", "content-disposition"))
        filename = head.get_param("filename", None, "content-disposition")
        if name == "file" and filename is not None:
            found = head.get_filename("") or "", start + 4, end
        elif end - start - 4 > _MAX_FIELD_BYTES:
            raise _broken(f"has a field {name[:64]!r} of more than {_MAX_FIELD_BYTES} bytes")
        else:
            fields[name] = body[start + 4 : end].decode("utf-8", "replace")
        place = end + 2 + len(mark)
    if found is None:
        raise bad_request("the form has no file; send one as the part `file`", "file")
    return Form(fields, *found)


def _find(body: mmap.mmap, text: bytes, start: int) -> int:
    """As body.find, in windows: other threads run in between."""
    for place in range(start, len(body), _WINDOW_BYTES):
        found = body.find(text, place, place + _WINDOW_BYTES + len(text) - 1)
        if found >= 0:
            return found
    return -1


def _broken(what: str) -> ApiError:
    return bad_request(f"the form {what}; send purpose and file as multipart/form-data")


def copy_part(source: Path, form: Form, target: Path) -> int:
    """Write the file's content; returns its bytes."""
    left = form.end - form.start
    with source.open("rb") as file, target.open("wb") as out:
        file.seek(form.start)
        while left and (piece := file.read(min(left, 1 << 20))):
            out.write(piece)
            left -= len(piece)
    return form.end - form.start
