# SPDX-License-Identifier: Apache-2.0
"""PUT /v1/adapters/NAME: an adapter's tensors in the body, served as the name's next version."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from moe_lora.adapters.peft.files import CONFIG_FILE, WEIGHTS_FILE
from moe_lora.core.errors import EngineDeadError
from moe_lora.core.host import OwnFolder
from moe_lora.dist.net.thread import in_daemon_thread
from moe_lora.serve.http_errors import ApiError, JsonResponse, bad_request
from moe_lora.serve.openai.protocol import LoadAdapterRequest

from .adapter_routes import AdapterLoads, adapter_card, check_new_name

if TYPE_CHECKING:
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
        await self._remove_unserved()
        said = request.headers.get("content-length", "")
        self._check_room(int(said) if said.isdecimal() else 0)
        folder = self._new_folder()
        try:
            (folder / CONFIG_FILE).write_text(config, encoding="utf-8")
            await self._receive(request, folder)
            body = LoadAdapterRequest(lora_name=name, lora_path=str(folder))
            info = await self._loads.load(body, in_place=True)
        except OSError as error:
            raise _unwritable(error) from error
        finally:
            self._receiving.discard(folder)
            await self._remove_unserved()
        return JsonResponse(adapter_card(info))

    async def refuse(self, request: Request) -> Response:
        """SGLang's body has a pickle."""
        raise bad_request(
            f"serialized_tensors is a pickle, and a pickle can run code when it is opened; {_WAY_OUT}",
            "serialized_tensors",
        )

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

    async def _receive(self, request: Request, folder: Path) -> None:
        try:
            with (folder / WEIGHTS_FILE).open("wb") as out:
                unwritten = bytearray()
                async for piece in request.stream():
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
