# SPDX-License-Identifier: Apache-2.0
"""Adapters by their tensors in bodies, each served as the next version of its name."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from base64 import b64decode
from collections.abc import AsyncIterator
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
from moe_lora.serve.limits import SMALL_BODY_BYTES
from moe_lora.serve.openai.protocol import LoadAdapterRequest

from .adapter_routes import DONE, AdapterLoads, adapter_card, check_new_name
from .controls import Query, read_json

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


class TensorsBody(Query):
    """serialized_tensors: one for all ranks: the server divides the tensors."""

    lora_name: str
    config_dict: dict[str, Any]
    serialized_tensors: str | Annotated[list[str], Field(min_length=1, max_length=1)]
    load_format: None = None


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
        most = self._frontend.config.received_mb << 20
        body = await read_json(request, TensorsBody, self._frontend, SMALL_BODY_BYTES + most * 4 // 3)
        check_new_name(body.lora_name, self._frontend)
        given = body.serialized_tensors
        if not isinstance(given, str):
            given = given[0]
        try:
            content = await in_daemon_thread(b64decode, given, None, True)
        except ValueError:
            raise bad_request("serialized_tensors is not base64", "serialized_tensors") from None

        async def pieces() -> AsyncIterator[bytes]:
            yield content

        await self._serve(body.lora_name, json.dumps(body.config_dict), pieces(), len(content))
        return JsonResponse(DONE)

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
        if sum(self._num_bytes.values()) + num_bytes > most << 20:
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
