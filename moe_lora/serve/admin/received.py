# SPDX-License-Identifier: Apache-2.0
"""Adapters from tensors in bodies."""

from __future__ import annotations

import atexit
import json
import re
import shutil
import tempfile
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Request
from pydantic import Field
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from moe_lora.adapters.peft.files import CONFIG_FILE, MAX_CONFIG_BYTES, WEIGHTS_FILE
from moe_lora.core.errors import EngineDeadError
from moe_lora.core.host import OwnFolder
from moe_lora.core.wrong_files import announced_bytes
from moe_lora.dist.net.thread import in_daemon_thread
from moe_lora.serve.http_errors import NOT_JSON, ApiError, JsonResponse, bad_request
from moe_lora.serve.limits import JSON_MEDIA, RETRY_S, SMALL_BODY_BYTES

from .adapter_routes import DONE, AdapterLoads, LoadAdapterRequest, adapter_card, check_new_name
from .controls import Query, parse_json

if TYPE_CHECKING:
    from moe_lora.core.request import AdapterInfo
    from moe_lora.serve.frontend import Frontend
    from moe_lora.serve.openai.preparing import Preparer

CONFIG_HEADER = "X-Adapter-Config"
PREFIX = "moe_lora-received-"
_CHUNK_BYTES = 1 << 20
_WAY_OUT = (
    "PUT the bytes of safetensors.torch.save to /v1/adapters/NAME, with adapter_config.json as "
    f"{CONFIG_HEADER}"
)
_FILE = re.compile(rb'"(serialized_(?:named_)?tensors)"\s{0,999}:\s{0,999}(?:\[\s{0,999})?"')
_MOST_OVERLAP = 4096
"""Longer than a match of `_FILE`."""
_ESCAPE = re.compile(rb"\\(?:/|u00(2[bf]|3d))", re.IGNORECASE)
"""JSON's escapes of base64 characters."""
_CUT = b"file"
"""Replaces the file in SGLang's body."""
MOST_BESIDE_BYTES = MAX_CONFIG_BYTES + SMALL_BODY_BYTES


_OneText = Annotated[list[str], Field(min_length=1, max_length=1)]


class TensorsBody(Query):
    """serialized_tensors: a single file: the server divides tensors among ranks.

    serialized_named_tensors: SGLang's later name.
    """

    lora_name: str
    config_dict: dict[str, Any]
    serialized_tensors: str | _OneText | None = None
    serialized_named_tensors: _OneText | None = None
    load_format: None = None

    @property
    def file(self) -> tuple[str, str]:
        """The field's name, and the file.  Raises ApiError."""
        fields = ("serialized_tensors", "serialized_named_tensors")
        given = [(name, found) for name in fields if (found := getattr(self, name)) is not None]
        if len(given) != 1:
            raise bad_request(f"give one of {' and '.join(fields)}: a safetensors file in base64", fields[0])
        name, found = given[0]
        return name, found if isinstance(found, str) else found[0]


class EncodedBody:
    """SGLang's body: decodes the file on arrival.  Raises ApiError."""

    def __init__(self, request: Request, frontend: Frontend) -> None:
        if not JSON_MEDIA.fullmatch(request.headers.get("content-type", "")):
            raise bad_request(NOT_JSON)
        self._stream, self._limits = request.stream(), frontend.limits
        self._rest = bytearray()

    async def file(self) -> AsyncIterator[bytes]:
        """The file's bytes; reads the whole body."""
        field, coded, is_past = "", b"", False
        async for piece in self._stream:
            if not field:
                seen = len(self._rest)
                self._add(piece)
                found = _FILE.search(self._rest, max(0, seen - _MOST_OVERLAP))
                if found is None:
                    continue
                field, start = found[1].decode(), found.end()
                piece = bytes(self._rest[start:])
                self._rest[start:] = _CUT
            if is_past:
                self._add(piece)
                continue
            content, quote, rest = piece.partition(b'"')
            coded, escape = _unescaped(coded + content)
            num = len(coded) if quote else len(coded) // 4 * 4
            yield _decoded(coded[:num] + (escape if quote else b""), field)
            coded, is_past = coded[num:] + escape, bool(quote)
            self._add(quote + rest)

    async def words(self) -> tuple[str, str]:
        """Name and config, after the file."""
        body = await parse_json(self._rest, TensorsBody)
        field, file = body.file
        if file != _CUT.decode():
            raise bad_request(f"{field} stands twice in the body; send it once", field)
        return body.lora_name, json.dumps(body.config_dict)

    def _add(self, piece: bytes) -> None:
        if len(self._rest) + len(piece) > MOST_BESIDE_BYTES:
            what = f"the body has more than {MOST_BESIDE_BYTES} bytes beside the file; send less"
            raise self._limits.refusal("body_size", ApiError(413, what, closes=True))
        self._rest += piece


def _unescaped(coded: bytes) -> tuple[bytes, bytes]:
    """Base64 without JSON's escapes, and a final cut escape."""
    start = coded.rfind(b"\\", max(0, len(coded) - 5))
    if start < 0 or _ESCAPE.match(coded, start):
        start = len(coded)
    plain = _ESCAPE.sub(lambda found: b"/" if found[1] is None else bytes([int(found[1], 16)]), coded[:start])
    return plain, coded[start:]


def _is_pickle(head: bytearray) -> bool:
    """True for torch.save's archive and for a pickle."""
    return head.startswith(b"PK\x03\x04") or (head.startswith(b"\x80") and head[8:9] not in (b"", b"{"))


def _decoded(coded: bytes, field: str) -> bytes:
    """Raises ApiError."""
    try:
        return b64decode(coded, validate=True)
    except ValueError:
        raise ApiError(400, f"{field} is not base64", field, closes=True) from None


class Endpoints:
    """Received files stay in one folder until the name's next version is served."""

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend = frontend
        self._own: OwnFolder | None = None
        self._num_bytes: dict[Path, int] = {}
        """By folder."""
        self._receiving: set[Path] = set()

    async def put(self, request: Request) -> Response:
        """Serve the body's tensors as the next version of the name."""
        name = request.path_params["name"]
        check_new_name(name, self._frontend)
        config = _config(request.headers.get(CONFIG_HEADER))
        async with self._received(request.stream(), _stated_bytes(request)) as folder:
            info = await self._serve(folder, name, config)
        return JsonResponse(adapter_card(info))

    async def load(self, request: Request) -> Response:
        """As `put`, for SGLang's body with safetensors in base64."""
        body = EncodedBody(request, self._frontend)
        async with self._received(body.file(), _stated_bytes(request) * 3 // 4) as folder:
            name, config = await body.words()
            check_new_name(name, self._frontend)
            await self._serve(folder, name, config)
        return JsonResponse(DONE)

    async def _serve(self, folder: Path, name: str, config: str) -> AdapterInfo:
        (folder / CONFIG_FILE).write_text(config, encoding="utf-8")
        body = LoadAdapterRequest(lora_name=name, lora_path=str(folder))
        # Kept loads are for later comparisons of files: no later body has this folder.
        return await AdapterLoads(self._frontend).load(body, in_place=True)

    @asynccontextmanager
    async def _received(self, pieces: AsyncIterator[bytes], num_bytes: int) -> AsyncIterator[Path]:
        """A folder with the received file; deleted unless served.

        num_bytes: most bytes of the file; 0: unknown.
        """
        await self._remove_unserved()
        self._check_room(num_bytes)
        folder = self._new_folder()
        try:
            await self._receive(pieces, folder, num_bytes)
            yield folder
        except OSError as error:
            raise _unwritable(error) from error
        finally:
            self._receiving.discard(folder)
            await self._remove_unserved()

    def _new_folder(self) -> Path:
        try:
            if self._own is None:
                root = self._frontend.cluster.engine.adapter_root
                self._own = OwnFolder(None if root is None else Path(root), PREFIX)
                atexit.register(self._own.remove)
            folder = Path(tempfile.mkdtemp(dir=self._own.path))
        except OSError as error:
            raise _unwritable(error) from error
        self._num_bytes[folder] = 0
        self._receiving.add(folder)
        return folder

    async def _receive(self, pieces: AsyncIterator[bytes], folder: Path, num_bytes: int) -> None:
        """Write the file once the header is complete."""
        unwritten, num_received, whole = bytearray(), 0, None
        try:
            with (folder / WEIGHTS_FILE).open("wb") as out:
                async for piece in pieces:
                    unwritten += piece
                    num_received += len(piece)
                    if whole is None:
                        whole = await self._announced(unwritten, folder, num_bytes)
                    if whole is not None and num_received > whole:
                        raise _unreadable(f"the header names {whole} bytes, and more arrive")
                    if whole is not None and len(unwritten) >= _CHUNK_BYTES:
                        await in_daemon_thread(out.write, bytes(unwritten))
                        unwritten.clear()
                await in_daemon_thread(out.write, bytes(unwritten))
        except ClientDisconnect:
            raise bad_request("the connection ended before the body did") from None

    async def _announced(self, head: bytearray, folder: Path, num_bytes: int) -> int | None:
        """The file's bytes by its header, counted for the room; None before the header's end.

        Raises ApiError for a pickle, another file, and too many bytes.
        """
        if _is_pickle(head):
            what = "the body is a pickle, and a pickle can run code when it is opened"
            raise ApiError(400, f"{what}; {_WAY_OUT}", closes=True)
        try:
            whole = await in_daemon_thread(announced_bytes, head) if len(head) > 8 else None
        except ValueError as error:
            raise _unreadable(str(error)) from None
        counted = len(head) if whole is None else whole
        self._check_room(counted, folder)
        self._num_bytes[folder] = counted
        if num_bytes and counted > num_bytes:
            raise _unreadable(f"the header names {counted} bytes, and the body has at most {num_bytes}")
        return whole

    def _check_room(self, num_bytes: int, folder: Path | None = None) -> None:
        """Raises ApiError 413 unless num_bytes fit; 503 if current uploads take the room."""
        most = self._frontend.limits.config.received_mb
        others = {one: num for one, num in self._num_bytes.items() if one != folder}
        if sum(others.values()) + num_bytes <= most << 20:
            return
        what = f"the adapters received here would have more than front_end.received_mb={most}"
        if num_bytes + sum(num for one, num in others.items() if one not in self._receiving) <= most << 20:
            raise ApiError(503, f"{what} with other uploads; retry later", retry_s=RETRY_S, closes=True)
        raise ApiError(413, f"{what}; unload some, or raise received_mb", closes=True)

    async def _remove_unserved(self) -> None:
        """Remove the folders of unserved versions."""
        client = self._frontend.client
        try:
            kept = {one.path for one in client.adapters.values()} | {str(one) for one in self._receiving}
            # Before the wait: a version served meanwhile stays.
            folders = [one for one in self._num_bytes if str(one) not in kept]
            served = {one.path for one in await client.list_adapters()} if folders else set()
        except EngineDeadError:
            return  # a restarting instance may need the files
        for folder in folders:
            if str(folder) not in served:
                await in_daemon_thread(shutil.rmtree, folder, True)
                self._num_bytes.pop(folder, None)


def _stated_bytes(request: Request) -> int:
    """The body's Content-Length; 0: absent."""
    said = request.headers.get("content-length", "")
    return int(said) if said.isdecimal() else 0


def _unreadable(problem: str) -> ApiError:
    return ApiError(400, f"the body is not a readable safetensors file ({problem}); {_WAY_OUT}", closes=True)


def _config(text: str | None) -> str:
    """The header's JSON.  Raises ApiError."""
    if text is None:
        raise bad_request(f"the header {CONFIG_HEADER} is missing; {_WAY_OUT}", CONFIG_HEADER)
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise bad_request(f"{CONFIG_HEADER} is no JSON object; {_WAY_OUT}", CONFIG_HEADER)
    return json.dumps(found)


def _unwritable(error: OSError) -> ApiError:
    what = f"the adapter can't be stored: {error.strerror or error}"
    return ApiError(503, f"{what}; see the disk and permissions of the folder for adapters", closes=True)
