# SPDX-License-Identifier: Apache-2.0
"""Routes of aliases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Request
from pydantic import Strict
from starlette.responses import Response

from moe_lora.engine.client.messages import AliasChange, AliasStep
from moe_lora.serve.aliases import alias_card
from moe_lora.serve.http_errors import JsonResponse, bad_request
from moe_lora.serve.openai.protocol import Text

from .adapter_routes import check_new_name
from .controls import Nothing, Query, read_json

if TYPE_CHECKING:
    from moe_lora.serve.frontend import Frontend
    from moe_lora.serve.openai.preparing import Preparer


class RolloutBody(Query):
    """to: a loaded adapter, or a registry version such as v8.  share: 0 < share <= 1."""

    to: Text
    share: Annotated[float, Strict()] | None = None


class Endpoints:
    """Methods answer once every front end has the change."""

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend = frontend

    async def rollout(self, request: Request) -> Response:
        """A first rollout makes the alias."""
        from moe_lora.dist.cluster.rollouts import VERSION

        body = await read_json(request, RolloutBody, self._frontend)
        name = request.path_params["name"]
        check_new_name(name, self._frontend, "name")
        hidden = {f"{base}:{name}" for base in self._frontend.model_names}
        for adapter in hidden & self._frontend.client.adapters.keys():
            what = f"name={name!r} would hide the adapter {adapter!r}; choose another name"
            raise bad_request(what, "name")
        if body.to in self._frontend.model_names:
            raise bad_request(f"to={body.to!r} is the base model's name; name an adapter", "to")
        if self._frontend.cluster.registry is None or not VERSION.fullmatch(body.to):
            await self._frontend.client.is_served(body.to)
        return await self._change(request, AliasChange("rollout", body.to, body.share))

    async def promote(self, request: Request) -> Response:
        return await self._step(request, "promote")

    async def rollback(self, request: Request) -> Response:
        return await self._step(request, "rollback")

    async def drop(self, request: Request) -> Response:
        return await self._step(request, "drop")

    async def remove(self, request: Request) -> Response:
        await self._step(request, "remove")
        return JsonResponse({"id": request.path_params["name"], "object": "alias", "deleted": True})

    async def _step(self, request: Request, step: AliasStep) -> Response:
        await read_json(request, Nothing, self._frontend)
        return await self._change(request, AliasChange(step))

    async def _change(self, request: Request, change: AliasChange) -> Response:
        name = request.path_params["name"]
        alias, saved = await self._frontend.controller.call("change_alias", name, change)
        return JsonResponse({**alias_card(name, alias), "saved": saved})
