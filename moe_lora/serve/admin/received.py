# SPDX-License-Identifier: Apache-2.0
"""Tensors of adapters in bodies, served as the next version of a name."""

from __future__ import annotations

import atexit
import json
import shutil
import sys
import tempfile
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Request
from pydantic import Field
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from moe_lora.adapters.peft.files import CONFIG_FILE, WEIGHTS_FILE
from moe_lora.core.errors import EngineDeadError
from moe_lora.core.host import OwnFolder
from moe_lora.dist.net.thread import in_daemon_thread
from moe_lora.serve.http_errors import ApiError, JsonResponse, bad_request
from moe_lora.serve.limits import Quota, body_of

from .adapter_routes import DONE, AdapterLoads, LoadAdapterRequest, adapter_card, check_new_name
from .controls import Query, parse_json

if TYPE_CHECKING:
    from moe_lora.core.request import AdapterInfo
    from moe_lora.serve.frontend import Frontend
    from moe_lora.serve.openai.preparing import Preparer

CONFIG_HEADER = "X-Adapter-Config"
PREFIX = "moe_lora-received-"
_CHUNK_BYTES = 1 << 20
_PICKLES = (b"\x80", b"PK\x03\x04")
"""First bytes of a pickle, and of torch.save's archive of pickles."""
_WAY_OUT = (
    "PUT the bytes of safetensors.torch.save to /v1/adapters/NAME, with adapter_config.json as "
    f"{CONFIG_HEADER}"
)


_OneText = Annotated[list[str], Field(min_length=1, max_length=1)]


class TensorsBody(Query):
    """serialized_tensors: a single file: the server divides tensors among ranks.

    serialized_named_tensors: the same, by the name of later versions of SGLang.
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


class Endpoints:
    """Methods answer one path each.

    Received files lie in one folder, below `adapter_root` if set, until the name's next version is served.
    """

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend = frontend
        self._loads = AdapterLoads(frontend)
        self._own: OwnFolder | None = None
        self._num_bytes: dict[Path, int] = {}
        """By folder."""
        self._receiving: set[Path] = set()
        self.bodies = Quota(sys.maxsize, sys.maxsize)
        """Bytes of bodies in base64, until their folders count; `take_body` bounds them."""

    async def put(self, request: Request) -> Response:
        """Serve the body's tensors as the next version of the name; running requests keep theirs."""
        name = request.path_params["name"]
        check_new_name(name, self._frontend)
        config = _config(request.headers.get(CONFIG_HEADER))
        said = request.headers.get("content-length", "")
        info = await self._serve(name, config, request.stream(), int(said) if said.isdecimal() else 0)
        return JsonResponse(adapter_card(info))

    async def load(self, request: Request) -> Response:
        """As `put`, for SGLang's body with a safetensors file in base64; a pickle is refused."""
        async with AsyncExitStack() as counted:
            counts = body_of(request, self._frontend.limits, sys.maxsize, self)
            content = await counted.enter_async_context(counts)
            name, config, file = await self._decoded(content)
            content.clear()

            async def pieces() -> AsyncIterator[bytes]:
                await counted.aclose()  # The folder counts the file from here on.
                yield file

            await self._serve(name, config, pieces(), 0)
        return JsonResponse(DONE)

    async def _decoded(self, content: bytearray) -> tuple[str, str, bytes]:
        """The name, config and file in SGLang's body.  Raises ApiError."""
        body = await parse_json(content, TensorsBody)
        check_new_name(body.lora_name, self._frontend)
        field, given = body.file
        try:
            file = await in_daemon_thread(b64decode, given, None, True)
        except ValueError:
            raise bad_request(f"{field} is not base64", field) from None
        return body.lora_name, json.dumps(body.config_dict), file

    def take_body(self, client: str, num_bytes: int) -> None:
        """Count bytes of a body in base64.  Raises ApiError beyond the room."""
        self._check_room(num_bytes * 3 // 4)
        self.bodies.take(client, num_bytes)

    async def _serve(
        self, name: str, config: str, pieces: AsyncIterator[bytes], num_bytes: int
    ) -> AdapterInfo:
        """Serve a file of tensors.  num_bytes: of the file, if known."""
        await self._remove_unserved()
        self._check_room(num_bytes)
        folder = self._new_folder()
        try:
            (folder / CONFIG_FILE).write_text(config, encoding="utf-8")
            await self._receive(pieces, folder)
            body = LoadAdapterRequest(lora_name=name, lora_path=str(folder))
            return await self._loads.load(body, in_place=True)
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

    async def _receive(self, pieces: AsyncIterator[bytes], folder: Path) -> None:
        try:
            with (folder / WEIGHTS_FILE).open("wb") as out:
                unwritten = bytearray()
                async for piece in pieces:
                    if not self._num_bytes[folder] and piece.startswith(_PICKLES):
                        what = "the body is a pickle, and a pickle can run code when it is opened"
                        raise ApiError(400, f"{what}; {_WAY_OUT}", closes=True)
                    self._check_room(len(piece))
                    self._num_bytes[folder] += len(piece)
                    unwritten += piece
                    if len(unwritten) >= _CHUNK_BYTES:
                        await in_daemon_thread(out.write, bytes(unwritten))
                        unwritten.clear()
                await in_daemon_thread(out.write, bytes(unwritten))
        except ClientDisconnect:
            raise bad_request("the connection ended before the body did") from None

    def _check_room(self, num_bytes: int) -> None:
        most = self._frontend.config.received_mb
        in_all = sum(self._num_bytes.values()) + self.bodies.in_all * 3 // 4
        if in_all + num_bytes > most << 20:
            what = f"the adapters received here would have more than front_end.received_mb={most}"
            raise ApiError(413, f"{what}; unload some, or raise received_mb", closes=True)

    async def _remove_unserved(self) -> None:
        """Remove the folders of refused adapters and of former versions."""
        try:
            served = {one.path for one in await self._frontend.client.list_adapters()}
        except EngineDeadError:
            return  # an instance that starts again may need them
        for folder in [one for one in self._num_bytes if one not in self._receiving]:
            if str(folder) not in served:
                await in_daemon_thread(shutil.rmtree, folder, True)
                self._num_bytes.pop(folder, None)


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
