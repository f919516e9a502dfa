# SPDX-License-Identifier: Apache-2.0
"""/v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import Request
from pydantic import Field
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, Response

from moe_lora.core.errors import ConfigError
from moe_lora.serve.access import caller_of
from moe_lora.serve.admin.controls import read_json
from moe_lora.serve.http_errors import ApiError, JsonResponse, bad_request
from moe_lora.serve.openai.protocol import ApiModel, Text

from .lines import URLS
from .running import Batches
from .store import Form, Kind, Record, Store, boundary_of, copy_part, read_form, unwritable

if TYPE_CHECKING:
    from fastapi import FastAPI

    from moe_lora.serve.frontend import Frontend
    from moe_lora.serve.openai.preparing import Preparer

_PAGE = 20
_MAX_PAGE = 10_000
_UNSET = (
    *("error_file_id", "output_file_id", "errors", "in_progress_at", "expires_at", "finalizing_at"),
    *("completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at"),
)


class BatchBody(ApiModel):
    """POST /v1/batches."""

    input_file_id: Text
    endpoint: Text
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: Literal[None] = None


def opened(frontend: Frontend, app: FastAPI) -> Batches:
    """The front end's batches, opened at the first call.  Raises ConfigError and ApiError."""
    if frontend.batches is None:
        if len(frontend.cluster.front_ends) > 1:
            what = "files and batches need a server with one front end; use moe-lora batch --server"
            raise ApiError(400, what)
        config = frontend.config
        frontend.batches = Batches(frontend, app, Store(config.batch_dir, config.batch_bytes))
    return frontend.batches


class Endpoints:
    """Methods answer one path each."""

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend = frontend

    def _opened(self, request: Request) -> Batches:
        try:
            return opened(self._frontend, request.app)
        except ConfigError as error:
            raise ApiError(503, str(error)) from error

    async def create_file(self, request: Request) -> Response:
        """Receive a form to disk; keep its file."""
        boundary = boundary_of(request.headers.get("content-type", ""))
        batches, (owner, key) = self._opened(request), _owner(request)
        store, num_bytes = batches.store, 0
        store.check_room(owner, "file")
        new, content = store.new_path(), store.new_path()
        try:
            with new.open("wb") as out:
                async for piece in request.stream():
                    num_bytes += len(piece)
                    store.receive(owner, len(piece))
                    out.write(piece)
            form = await asyncio.to_thread(read_form, new, boundary)
            shown = _file_of(form)
            await asyncio.to_thread(copy_part, new, form, content)
            record = store.add(owner, key, shown, content)
        except ClientDisconnect:
            raise bad_request("the connection ended before the body did") from None
        except OSError as error:
            raise ApiError(503, str(unwritable(error)), closes=True) from error
        finally:
            store.receive(owner, -num_bytes)
            with suppress(OSError):  # the next start removes both
                new.unlink(missing_ok=True)
                content.unlink(missing_ok=True)
        return JsonResponse(record.shown)

    async def list_files(self, request: Request) -> Response:
        """The key's files, newest first."""
        return self._listed(request, "file", ("purpose",))

    async def read_file(self, request: Request) -> Response:
        return JsonResponse(self._found(request, "file").shown)

    async def delete_file(self, request: Request) -> Response:
        record, batches = self._found(request, "file"), self._opened(request)
        if batches.uses(record):
            raise bad_request("a batch reads this file; cancel the batch or wait for its end", "file_id")
        batches.store.remove(record)
        return JsonResponse({"id": record.id, "object": "file", "deleted": True})

    async def file_content(self, request: Request) -> Response:
        record = self._found(request, "file")
        path: Path = self._opened(request).store.path(record.id)
        return FileResponse(path, media_type="application/jsonl")

    async def create_batch(self, request: Request) -> Response:
        body = await read_json(request, BatchBody, self._frontend)
        if body.endpoint not in URLS:
            what = f"endpoint={body.endpoint[:64]!r} is not allowed; allowed are {', '.join(URLS)}"
            raise bad_request(what, "endpoint")
        batches, (owner, key) = self._opened(request), _owner(request)
        file = batches.store.get(owner, "file", body.input_file_id, "input_file_id")
        if file.shown["purpose"] != "batch":
            raise bad_request("input_file_id names results; upload a file of requests", "input_file_id")
        batches.store.check_room(owner, "file")
        batches.store.check_room(owner, "batch")
        counts = {"total": 0, "completed": 0, "failed": 0}
        shown = {
            "object": "batch",
            "status": "validating",
            **body.model_dump(exclude={"output_expires_after"}),
        }
        record = batches.store.add(owner, key, {**shown, "request_counts": counts, **dict.fromkeys(_UNSET)})
        answer = JsonResponse(record.shown)
        batches.start(owner)
        return answer

    async def list_batches(self, request: Request) -> Response:
        """The key's batches, newest first."""
        return self._listed(request, "batch", ())

    async def read_batch(self, request: Request) -> Response:
        return JsonResponse(self._found(request, "batch").shown)

    async def cancel_batch(self, request: Request) -> Response:
        record = self._found(request, "batch")
        if record.has_ended:
            raise bad_request(f"the batch has ended: {record.shown['status']}", "batch_id")
        self._opened(request).cancel(record)
        return JsonResponse(record.shown)

    def _found(self, request: Request, kind: Kind) -> Record:
        store, (owner, _) = self._opened(request).store, _owner(request)
        return store.get(owner, kind, request.path_params[f"{kind}_id"])

    def _listed(self, request: Request, kind: Kind, filters: tuple[str, ...]) -> Response:
        store, (owner, _) = self._opened(request).store, _owner(request)
        query = request.query_params
        limit, order, after = query.get("limit", str(_PAGE)), query.get("order", "desc"), query.get("after")
        num = int(limit) if limit.isdecimal() and len(limit) < 10 else 0
        if not 1 <= num <= _MAX_PAGE:
            raise bad_request(f"limit={limit[:32]!r} must be a number from 1 to {_MAX_PAGE}", "limit")
        if order not in ("asc", "desc"):
            raise bad_request(f"order={order[:32]!r} must be asc or desc", "order")
        found = [one.shown for one in store.all_of(kind, owner)]
        if order == "desc":
            found.reverse()
        if after is not None:
            store.get(owner, kind, after)
            ids = [one["id"] for one in found]
            found = found[ids.index(after) + 1 :]
        for name in filters:
            found = [one for one in found if query.get(name) in (None, one[name])]
        page = found[:num]
        ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        more = len(found) > len(page)
        listed = {"object": "list", "data": page, "first_id": ends[0], "last_id": ends[1], "has_more": more}
        return JsonResponse(listed)


def _owner(request: Request) -> tuple[str, str | None]:
    """Tenant and id of the key."""
    caller = caller_of(request.scope)
    return caller.tenant, None if caller.key is None else caller.key.id


def _file_of(form: Form) -> dict[str, Any]:
    fields = dict(form.fields)
    purpose = fields.pop("purpose", None)
    if purpose != "batch":
        raise bad_request(f"purpose={str(purpose)[:64]!r} is not allowed; purpose must be batch", "purpose")
    if fields:
        name = next(iter(fields))[:64]
        raise bad_request(f"{name} is not supported; leave it out", name)
    about = {"purpose": purpose, "status": "processed", "expires_at": None}
    return {"object": "file", "bytes": form.end - form.start, "filename": form.filename[:256], **about}
