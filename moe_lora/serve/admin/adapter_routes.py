# SPDX-License-Identifier: Apache-2.0
"""Routes for adapters, with the names of vLLM and SGLang."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from moe_lora.adapters.peft.files import CONFIG_FILE, MLX_FILE, WEIGHTS_FILE, adapter_folder
from moe_lora.core.errors import (
    AdapterError,
    AdapterExistsError,
    AdapterNotFoundError,
    BusyError,
    CapacityError,
    ConfigError,
    MoeLoraError,
    PeerUnreachableError,
)
from moe_lora.core.request import COMPOSED, AdapterInfo, is_base_name, name_problem
from moe_lora.core.wrong_files import confined, header_entries, open_file
from moe_lora.dist.net.thread import in_daemon_thread
from moe_lora.engine.text.tokenizer_files import TEXT_FILES
from moe_lora.serve.frontend import Frontend, adapter_in, log_text_of
from moe_lora.serve.http_errors import AlreadyLoadedError, ApiError, JsonResponse, bad_request, to_api_error
from moe_lora.serve.limits import bounded_route
from moe_lora.serve.openai.fields import shown_name
from moe_lora.serve.openai.protocol import PeerModel, Text, refuse_unknown

if TYPE_CHECKING:
    from moe_lora.core.records import RegisteredAdapter

DONE = {"status": "ok", "success": True}
"""Answer of the root routes, as in SGLang."""
logger = logging.getLogger(__name__)

_EXPERT_KEY = re.compile(r"\.experts\.")
_ONE_EXPERTS_KEY = re.compile(r"\.experts\.(?:.*\.)?\d+\.")
_CHUNK_BYTES = 1 << 20
MAX_KNOWN_LOADS = 10_000
"""Names may be unloaded elsewhere; a forgotten one is loaded again without a comparison."""
Stamps = dict[str, tuple[int, ...]]


class LoadAdapterRequest(PeerModel):
    """POST /v1/load_lora_adapter and /load_lora_adapter.

    lora_path None: the registry's folder.  base_model_name: empty or None: the served base.
    """

    lora_name: Text
    lora_path: Text | None = None
    load_inplace: bool | None = None
    base_model_name: Text | None = None
    is_3d_lora_weight: bool | None = None
    pinned: bool | None = None
    lora_id: str | None = None
    lora_int_id: int | None = None
    rid: Any = None


class UnloadAdapterRequest(PeerModel):
    """POST /v1/unload_lora_adapter and /unload_lora_adapter."""

    lora_name: Text
    base_model_name: Text | None = None
    lora_id: str | None = None
    lora_int_id: int | None = None
    rid: Any = None


def check_new_name(name: str, frontend: Frontend, param: str = "lora_name") -> None:
    """Raises ApiError for an unfit name, and for an alias's second name `base:alias`."""
    if problem := name_problem(name):
        raise bad_request(f"{param} {problem}", param)
    if name in frontend.model_names:
        raise bad_request(f"{param} {name!r} is the base model's name; choose another", param)
    if live := frontend.aliases.live:
        alias = adapter_in(name, frontend.model_names, ())
        if alias != name and alias in live:
            raise bad_request(f"{param} {name!r} reaches the alias {alias!r}; choose another", param)


def check_base(name: str | None, frontend: Frontend) -> None:
    """Raises ApiError for another base model."""
    model_dir = frontend.cluster.engine.model_dir
    allowed = {*frontend.model_names, model_dir, os.path.basename(os.path.normpath(model_dir))}
    if not is_base_name(name or "", allowed):
        raise bad_request(
            f"base_model_name={name!r} is not served here; the base model is {frontend.model_name!r} "
            "(moe-lora serve --served-model-name names it); send that name, or leave base_model_name out",
            "base_model_name",
        )


def find_files(path: str, name: str, frontend: Frontend) -> str:
    """Returns the directory of the adapter at a path or address.

    Raises ApiError 400 for a refused path or several adapters, 404 without an adapter, 503 for a source
    without an answer.  May block long.
    """
    if not path:
        raise bad_request("lora_path is empty; give the directory of a PEFT adapter", "lora_path")
    if frontend.cluster.sources is not None or "://" in path:
        path = _fetched(path, frontend)
    if not confined(path, frontend.cluster.engine.adapter_root):
        raise ApiError(
            404, f"no LoRA adapter found: {path!r} is not in the server's adapter_root", "lora_path"
        )
    try:
        found = adapter_folder(path, name)
    except AdapterError as error:
        raise bad_request(str(error), "lora_path") from error
    if not os.path.isfile(os.path.join(found, CONFIG_FILE)):
        problem = f"has no {CONFIG_FILE}" if os.path.isdir(path) else "is not a directory on the server"
        raise ApiError(404, f"no LoRA adapter found: {path!r} {problem}", "lora_path")
    return str(Path(found))


def _fetched(path: str, frontend: Frontend) -> str:
    """The local folder of a path or address.  Raises ApiError."""
    from moe_lora.adapters.sources import AdapterSources

    try:
        return AdapterSources(frontend.cluster.sources).local(path)
    except AdapterError as error:
        raise bad_request(str(error), "lora_path") from error
    except PeerUnreachableError as error:
        raise ApiError(503, f"{error}; send the request again", "lora_path") from error


class AdapterLoads:
    """Loads and unloads of one front end.  Knows the files of the last MAX_KNOWN_LOADS names."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._root = frontend.cluster.engine.adapter_root
        self._loaded: dict[str, tuple[int, _Files]] = {}
        texts = TEXT_FILES if frontend.adapter_texts is not None else ()
        self._patterns = [CONFIG_FILE, WEIGHTS_FILE, MLX_FILE, *texts, *(f"{name}/*" for name in texts)]

    async def load(self, body: LoadAdapterRequest, *, in_place: bool) -> AdapterInfo:
        """Load the body's adapter; in_place: as a new version.  Raises ApiError."""
        return await self._load(body, await self._checked(body), in_place=in_place)

    async def load_or_replace(self, body: LoadAdapterRequest) -> None:
        """As `load` in place, unless the content is equal.  Raises ApiError."""
        files = await self._checked(body)
        version, loaded = self._loaded.get(body.lora_name, (None, None))
        if loaded and loaded.sizes == files.sizes and version == await self._version(body.lora_name):
            files = await in_daemon_thread(files.read, self._root)
            if await in_daemon_thread(loaded.holds, files, self._root):
                if body.pinned:
                    await self._pin(body)
                return
        await self._load(body, files, in_place=True, reads=True)

    async def unload(self, body: UnloadAdapterRequest) -> None:
        """Unload the body's adapter.  Raises ApiError."""
        if problem := name_problem(body.lora_name.removeprefix(COMPOSED)):
            raise bad_request(f"lora_name {problem}", "lora_name")
        check_base(body.base_model_name, self._frontend)
        try:
            await self._frontend.client.call("unload_adapter", body.lora_name)
        except AdapterNotFoundError as error:
            what = f"the LoRA adapter {body.lora_name!r} cannot be found; GET /v1/models lists what is loaded"
            raise ApiError(404, what, "lora_name") from error
        self._loaded.pop(body.lora_name, None)

    async def _checked(self, body: LoadAdapterRequest) -> _Files:
        """Check the body before reading files; returns the adapter's files.  Raises ApiError."""
        check_new_name(body.lora_name, self._frontend)
        check_base(body.base_model_name, self._frontend)
        if body.lora_path is not None:
            folder = await in_daemon_thread(find_files, body.lora_path, body.lora_name, self._frontend)
        else:
            folder = await self._registered(body.lora_name)
        return _Files(folder, await in_daemon_thread(_stamps, folder, self._patterns), self._patterns)

    async def _load(
        self, body: LoadAdapterRequest, files: _Files, *, in_place: bool, reads: bool = False
    ) -> AdapterInfo:
        """reads: read the content for later comparison."""
        name = body.lora_name
        try:
            replace = in_place or self._frontend.client.is_refused(name)
            info: AdapterInfo = await self._frontend.client.call(
                "load_adapter", name, files.folder, replace=replace
            )
        except FileNotFoundError as error:
            what = f"no LoRA adapter found: the files of {name!r} are gone"
            raise ApiError(404, what, "lora_path") from error
        except AdapterExistsError as error:
            how = "unload it first, or send load_inplace=true to replace it"
            what = f"the LoRA adapter {name!r} has already been loaded; {how}"
            raise AlreadyLoadedError(400, what, "lora_name") from error
        except MoeLoraError as error:
            raise to_api_error(error) from error
        except OSError as error:
            raise bad_request(f"adapter {name!r} can't be read: {error.strerror or error}") from error
        except Exception as error:
            raise to_api_error(error) from error
        found = await in_daemon_thread(self._look_again, body, files, reads)
        if found is not None:
            self._loaded.pop(name, None)
            self._loaded[name] = info.version, found
            if len(self._loaded) > MAX_KNOWN_LOADS:
                del self._loaded[next(iter(self._loaded))]
        if body.pinned:
            await self._pin(body, unload=not in_place)
        return info

    def _look_again(self, body: LoadAdapterRequest, files: _Files, reads: bool) -> _Files | None:
        """Read text files, log a wrong layout; returns the files unless changed since the load."""
        texts, tokenizer = self._frontend.adapter_texts, self._frontend.tokenizer
        with suppress(OSError, ConfigError):
            log_text_of(self._frontend.cluster, body.lora_name, files.folder)
            if texts is not None and tokenizer is not None:
                texts(None).applied(body.lora_name, tokenizer)
        if body.is_3d_lora_weight is not None:
            _compare_layout(body.lora_name, files.folder, self._root, body.is_3d_lora_weight)
        if reads and files.digest is None:
            files = files.read(self._root)
        return files if files.stamps == _stamps(files.folder, self._patterns) else None

    async def _pin(self, body: LoadAdapterRequest, *, unload: bool = False) -> None:
        try:
            await self._frontend.client.call("pin_adapter", body.lora_name, pinned=True)
        except (BusyError, CapacityError) as error:
            if unload:
                await self._frontend.client.call("unload_adapter", body.lora_name)
            if isinstance(error, BusyError):
                raise
            state = "not loaded" if unload else "loaded, but not pinned"
            raise bad_request(f"{error}; the adapter is {state}", "pinned") from error

    async def _version(self, name: str) -> int | None:
        """Version of a loaded name; None if unknown or unavailable."""
        infos = await self._frontend.client.list_adapters()
        found = (info.version for info in infos if info.name == name and info.residency != "unavailable")
        return next(found, None)

    async def _registered(self, name: str) -> str:
        if self._frontend.cluster.registry is None:
            raise bad_request(
                "lora_path is missing; give the directory of a PEFT adapter, or start the server with "
                "--registry",
                "lora_path",
            )
        found: RegisteredAdapter = await self._frontend.controller.call("registry_resolve", name)
        return found.path


@dataclass(frozen=True)
class _Files:
    """The files of an adapter at one time, found by patterns.

    stamps: differ after a write.  digest: None: not read.
    """

    folder: str
    stamps: Stamps
    patterns: Sequence[str]
    digest: str | None = None

    @property
    def sizes(self) -> list[int]:
        return [size for _, _, size, *_ in self.stamps.values()]

    def read(self, root: str | None) -> _Files:
        return replace(self, digest=_digest(self.folder, self.stamps, root))

    def holds(self, other: _Files, root: str | None) -> bool:
        """True if these files have the bytes of `other`."""
        digest = self.digest
        if digest is None and self.stamps == _stamps(self.folder, self.patterns):
            digest = _digest(self.folder, self.stamps, root)
        return digest is not None and digest == other.digest


def _stamps(folder: str, patterns: Sequence[str]) -> Stamps:
    """By name within the folder."""
    try:
        paths = [path for pattern in patterns for path in sorted(Path(folder).glob(pattern))]
        found = {str(path.relative_to(folder)): path.stat() for path in paths if path.is_file()}
    except (OSError, ValueError):
        return {}
    return {
        name: (one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns)
        for name, one in found.items()
    }


def _digest(folder: str, names: Iterable[str], root: str | None) -> str | None:
    """SHA-256 of the named files; None if unreadable."""
    digest = hashlib.sha256()
    try:
        for name in names:
            digest.update(b"\0" + os.fsencode(name))
            with open_file(Path(folder, name), name, root) as file:
                while piece := file.read(_CHUNK_BYTES):
                    digest.update(piece)
    except (OSError, ValueError, AdapterError):
        return None
    return digest.hexdigest()


def _compare_layout(name: str, folder: str, root: str | None, is_3d: bool) -> None:
    """Warn if file and client differ on the experts' layout."""
    try:
        with open_file(Path(folder, WEIGHTS_FILE), WEIGHTS_FILE, root) as file:
            keys = [key for key in header_entries(file, WEIGHTS_FILE) if _EXPERT_KEY.search(key)]
    except (OSError, ValueError, AdapterError):
        return
    found_3d = any(not _ONE_EXPERTS_KEY.search(key) for key in keys)
    if keys and found_3d != is_3d:
        layout = "parameters of all experts" if found_3d else "a matrix of each expert"
        said = str(is_3d).lower()
        logger.warning("adapter %s: is_3d_lora_weight=%s, but its file has %s", name, said, layout)


def adapters_router(frontend: Frontend) -> APIRouter:
    router = APIRouter(tags=["adapters"], route_class=bounded_route(frontend.limits))
    loads = AdapterLoads(frontend)

    @router.post("/v1/load_lora_adapter", response_class=PlainTextResponse, response_model=None)
    async def load_lora_adapter(body: LoadAdapterRequest) -> Response:
        """Serve the PEFT adapter in `lora_path` as `lora_name`; with `load_inplace`, as a new version.

        Without `lora_path`: the registry's adapter of that name.
        """
        headers = ignored_by(body, frontend)
        await loads.load(body, in_place=bool(body.load_inplace))
        what = f"Success: LoRA adapter '{body.lora_name}' added successfully."
        return PlainTextResponse(what, headers=headers)

    @router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse, response_model=None)
    async def unload_lora_adapter(body: UnloadAdapterRequest) -> Response:
        """Refuse new requests for `lora_name`, finish running requests, free its memory."""
        headers = ignored_by(body, frontend)
        await loads.unload(body)
        what = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
        return PlainTextResponse(what, headers=headers)

    @router.post("/load_lora_adapter", response_model=None)
    async def load_or_replace(body: LoadAdapterRequest) -> Response:
        """As /v1/load_lora_adapter; a loaded name gets a new version, unless the content is equal."""
        headers = ignored_by(body, frontend)
        await loads.load_or_replace(body)
        return JsonResponse(DONE, headers=headers)

    @router.post("/unload_lora_adapter", response_model=None)
    async def unload_at_root(body: UnloadAdapterRequest) -> Response:
        """As /v1/unload_lora_adapter, with an answer in JSON."""
        headers = ignored_by(body, frontend)
        await loads.unload(body)
        return JsonResponse(DONE, headers=headers)

    @router.get("/v1/adapters/", response_model=None, include_in_schema=False)
    @router.get("/v1/adapters", response_model=None)
    async def list_adapters() -> Response:
        """Every adapter: place, size, users."""
        return JsonResponse(await _listed(frontend))

    @router.post("/v1/adapters/{name:path}/pin", response_model=None)
    async def pin(name: str) -> Response:
        """Load the adapter to the device of every instance and keep it there; 400 without room."""
        return JsonResponse(adapter_card(await frontend.client.call("pin_adapter", name, pinned=True)))

    @router.post("/v1/adapters/{name:path}/unpin", response_model=None)
    async def unpin(name: str) -> Response:
        """Let the adapter leave the device again."""
        return JsonResponse(adapter_card(await frontend.client.call("pin_adapter", name, pinned=False)))

    return router


async def _listed(frontend: Frontend) -> dict[str, Any]:
    cards = [adapter_card(info) for info in await frontend.client.list_adapters()]
    listed = {"object": "list", "data": cards}
    if frontend.aliases.live:
        from moe_lora.serve.aliases import alias_cards

        listed["aliases"] = alias_cards(frontend.aliases.live)
    return listed


def adapter_card(info: AdapterInfo) -> dict[str, Any]:
    return {
        "id": info.name,
        "object": "adapter",
        "version": info.version,
        "lora_rank": info.lora_rank,
        "bytes": info.nbytes,
        "path": info.path,
        "residency": info.residency,
        "problem": info.problem or None,
        "pages": info.num_pages,
        "pinned": info.pinned,
        "idle_s": None if info.idle_s is None else round(info.idle_s, 3),
        "requests_running": info.num_running,
        "requests_waiting": info.num_waiting,
    }


def ignored_by(body: LoadAdapterRequest | UnloadAdapterRequest, frontend: Frontend) -> dict[str, str]:
    """Returns the header with the body's unknown fields.  Raises ApiError if unknown fields are refused."""
    if frontend.limits.config.unknown_fields == "error":
        refuse_unknown(body)
    names = [shown_name(name) for name in body.unknown_fields()]
    return frontend.ignored_fields.note(names) if names else {}
