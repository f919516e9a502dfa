# SPDX-License-Identifier: Apache-2.0
"""Controls of trainers, with vLLM's and SGLang's names."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args

from anyio import fail_after
from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import PlainTextResponse, Response

import moe_lora
from moe_lora.core.errors import EngineDeadError
from moe_lora.core.request import GenerateRequest, ModelInfo, SamplingParams
from moe_lora.core.shape import rank_limit
from moe_lora.dist.net.thread import in_daemon_thread
from moe_lora.engine.client.messages import PauseMode, PauseScope, SleepPart
from moe_lora.serve.access import Caller, caller_of
from moe_lora.serve.http_errors import NOT_JSON, ApiError, JsonResponse, bad_request, describe_validation
from moe_lora.serve.limits import SMALL_BODY_BYTES, body_of

if TYPE_CHECKING:
    from moe_lora.serve.frontend import Frontend
    from moe_lora.serve.openai.preparing import Preparer

GENERATE_S = 20.0
"""Time limit of /health_generate."""
NO_RANK_LIMIT = 2**31 - 1
"""`max_lora_rank` without a limit: trainers compare numbers."""
Form = TypeVar("Form", bound=BaseModel)


class Query(BaseModel):
    """Values of a request, without unknown names."""

    model_config = ConfigDict(extra="forbid")


class PauseQuery(Query):
    mode: PauseMode = "abort"
    clear_cache: bool | None = None
    """None: true for an administrator alone."""
    wait_for_inflight_requests: bool = False
    """vLLM's old name of mode=wait."""


class SglangPause(Query):
    mode: Literal["abort", "in_place"] = "abort"


class InfoQuery(Query):
    config_format: Literal["json"] = "json"


class WorldQuery(Query):
    include_dp: bool = True


class ResetQuery(Query):
    reset_running_requests: Literal["false", "False", "0"] = "false"
    reset_external: Literal["false", "False", "0"] = "false"


class SleepQuery(Query):
    level: Literal["1", "2"] = "1"
    mode: PauseMode = "abort"


class MemoryBody(Query):
    """SGLang's names; cuda_graph frees nothing."""

    tags: Annotated[list[Literal["weights", "kv_cache", "cuda_graph"]], Field(fail_fast=True)] | None = None

    def parts(self, default: Sequence[str]) -> list[str]:
        return [tag for tag in self.tags or default if tag != "cuda_graph"]


class WakeUpQuery(Query):
    tags: Annotated[list[SleepPart], Field(fail_fast=True)] = []


class Nothing(Query):
    """No values."""


class Unread(BaseModel):
    """The body of a call with values in the URL."""

    model_config = ConfigDict(extra="allow")


def scope_of(caller: Caller) -> PauseScope:
    """Every request for an administrator; for a key, its tenant's requests for its adapters.

    Raises ApiError for other callers.
    """
    if caller.is_admin:
        return PauseScope()
    if caller.key is None:
        raise ApiError(403, "a pause needs an administrator, or a key of the server's key file")
    return PauseScope(f"key {caller.key.id}", caller.tenant, caller.key.adapters)


class Endpoints:
    """Methods answer once all instances are done."""

    PAUSED: ClassVar[dict[str, str]] = {"status": "paused"}
    RESUMED: ClassVar[dict[str, str]] = {"status": "resumed"}

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend, self._preparer = frontend, preparer

    async def pause(self, request: Request) -> Response:
        """Answers once no covered request computes."""
        query = await self._query(request, PauseQuery)
        mode = query.mode
        if query.wait_for_inflight_requests:
            if "mode" in query.model_fields_set and mode != "wait":
                what = f"wait_for_inflight_requests=true contradicts mode={mode}; leave one of them out"
                raise bad_request(what, "wait_for_inflight_requests")
            mode = "wait"
        clears_cache = query.clear_cache
        if clears_cache is None:
            clears_cache = caller_of(request.scope).is_admin
        await self._pause(request, mode, clears_cache=clears_cache)
        return JsonResponse(self.PAUSED)

    async def resume(self, request: Request) -> Response:
        await self._query(request, Nothing)
        await self._resume(request)
        return JsonResponse(self.RESUMED)

    async def is_paused(self, request: Request) -> Response:
        """True for a full pause, or a pause of the caller's key."""
        await self._query(request, Nothing)
        return JsonResponse({"is_paused": await self._is_paused(scope_of(caller_of(request.scope)).owner)})

    async def pause_generation(self, request: Request) -> Response:
        """As /pause; SGLang's in_place is keep."""
        body = await self._body(request, SglangPause)
        await self._pause(request, "keep" if body.mode == "in_place" else "abort", clears_cache=False)
        return JsonResponse(self.PAUSED)

    async def continue_generation(self, request: Request) -> Response:
        await self._body(request, Nothing)
        await self._resume(request)
        return JsonResponse(self.RESUMED)

    async def refuse_weights(self, request: Request) -> Response:
        """Refuses new weights of the base model."""
        what = f"{request.url.path} would change the base model's weights, and they never change here"
        raise bad_request(f"{what}; train LoRA, and PUT its safetensors to /v1/adapters/NAME")

    async def sleep(self, request: Request) -> Response:
        """Answers once every instance has released its memory."""
        query = await self._query(request, SleepQuery)
        await self._sleep(("weights", "kv_cache"), query.mode, drops_weights=query.level == "2")
        return Response()

    async def wake_up(self, request: Request) -> Response:
        """Answers once every instance has its memory."""
        query = await self._query(request, WakeUpQuery, "tags")
        await self._call("wake_up", query.tags or get_args(SleepPart))
        return Response()

    async def release_memory(self, request: Request) -> Response:
        """As /sleep with mode=wait; "weights" are dropped."""
        parts = (await self._body(request, MemoryBody)).parts(("weights", "kv_cache"))
        await self._sleep(parts, "wait", drops_weights="weights" in parts)
        return Response()

    async def resume_memory(self, request: Request) -> Response:
        await self._call("wake_up", (await self._body(request, MemoryBody)).parts(get_args(SleepPart)))
        return Response()

    async def is_sleeping(self, request: Request) -> Response:
        await self._query(request, Nothing)
        return JsonResponse({"is_sleeping": bool(await self._call("sleep_orders"))})

    async def reset_prefix_cache(self, request: Request) -> Response:
        await self._query(request, ResetQuery)
        await self._call("clear_cache")
        return Response()

    async def flush_cache(self, request: Request) -> Response:
        await self._query(request, Nothing)
        await self._call("clear_cache")
        return PlainTextResponse("Cache flushed: running requests keep their KV.\n")

    async def server_info(self, request: Request) -> Response:
        """The configuration under vLLM's names and SGLang's."""
        await self._query(request, InfoQuery)
        info, engine = await self._frontend.client.model_info(), self._frontend.cluster.engine
        limit = rank_limit(engine.max_lora_rank, info.devices)
        config = {
            "model_config": {
                "model": self._frontend.model_name,
                "dtype": f"torch.{info.dtype.removeprefix('torch.')}",
                "max_model_len": info.max_model_len,
                "logprobs_mode": "raw_logprobs",
            },
            "lora_config": {
                "max_loras": info.max_loras,
                "max_lora_rank": NO_RANK_LIMIT if limit is None else limit,
            },
            "parallel_config": {
                "data_parallel_size": 1,
                "tensor_parallel_size": engine.num_ranks,
                "world_size": engine.num_ranks,
            },
            "weight_transfer_config": None,
        }
        return JsonResponse({"vllm_config": config, **self._facts(info)})

    async def model_info(self, request: Request) -> Response:
        """The model under SGLang's names."""
        await self._query(request, Nothing)
        info, name = await self._frontend.client.model_info(), self._frontend.model_name
        found = {
            "model_path": name,
            "tokenizer_path": name,
            "is_generation": True,
            "preferred_sampling_params": info.sampling_defaults or None,
            "weight_version": "default",
            "model_type": info.family,
        }
        return JsonResponse(found)

    async def sglang_info(self, request: Request) -> Response:
        """The configuration under SGLang's names."""
        await self._query(request, Nothing)
        return JsonResponse(self._facts(await self._frontend.client.model_info()))

    def _facts(self, info: ModelInfo) -> dict[str, Any]:
        engine = self._frontend.cluster.engine
        return {
            "model_path": self._frontend.model_name,
            "served_model_name": self._frontend.model_name,
            "dtype": info.dtype,
            "context_length": info.max_model_len,
            "tp_size": engine.num_ranks,
            "dp_size": sum(one.live for one in self._frontend.client.instances),
            "max_loras_per_batch": info.max_loras,
            "max_lora_rank": rank_limit(engine.max_lora_rank, info.devices),
            "page_size": info.block_size,
            "max_total_num_tokens": info.block_size * info.num_kv_blocks,
            "version": moe_lora.__version__,
        }

    async def world_size(self, request: Request) -> Response:
        """Processes with the model, of one instance or of all."""
        query = await self._query(request, WorldQuery)
        num_live = sum(one.live for one in self._frontend.client.instances)
        num = self._frontend.cluster.engine.num_ranks * (num_live if query.include_dp else 1)
        return JsonResponse({"world_size": num})

    async def weight_version(self, request: Request) -> Response:
        """Versions of the caller's adapters."""
        caller = caller_of(request.scope)
        served = self._frontend.client.adapters
        versions = {name: one.version for name, one in served.items() if caller.may_use(name)}
        return JsonResponse({"weight_version": "default", "adapters": versions})

    async def liveness(self, request: Request) -> Response:
        """200 while the server answers."""
        return Response()

    async def health_generate(self, request: Request) -> Response:
        """200 after a token of the base model, in a full pause, and asleep."""
        client = self._frontend.client
        if not await client.is_alive():
            raise ApiError(503, "no engine is running or gets on; see the server's log")
        if await self._is_paused("") or await self._call("sleep_orders"):
            return Response()
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        asked = GenerateRequest(request_id=uuid.uuid4().hex, prompt_token_ids=(0,), sampling=sampling)
        try:
            with fail_after(GENERATE_S):
                async with aclosing(cast("Any", client.generate(asked))) as outputs:
                    async for output in outputs:
                        if output.finish_reason == "error":
                            raise ApiError(503, f"the engine can't run a request: {output.error}")
        except (TimeoutError, EngineDeadError) as error:
            what = f"no token within {GENERATE_S:g} s; see the server's log"
            raise ApiError(503, what) from error
        return Response()

    async def _sleep(self, parts: Sequence[str], mode: PauseMode, *, drops_weights: bool) -> None:
        timeout_s = self._frontend.limits.config.pause_timeout_s
        await self._call_in_time("sleep", parts, drops_weights, mode, timeout_s)

    async def _pause(self, request: Request, mode: PauseMode, *, clears_cache: bool) -> None:
        scope, timeout_s = scope_of(caller_of(request.scope)), self._frontend.limits.config.pause_timeout_s
        if mode == "keep" and scope.tenant is not None:
            what = (
                "a pause that keeps running requests needs an administrator: they hold memory of all tenants"
            )
            raise ApiError(403, f"{what}; choose mode=wait or mode=abort")
        if clears_cache and scope.tenant is not None:
            what = "clear_cache=true needs an administrator: other tenants' prompts would be computed anew"
            raise ApiError(403, f"{what}; leave it out")
        await self._call_in_time("pause_requests", scope, mode, timeout_s, clears_cache)

    async def _resume(self, request: Request) -> None:
        scope = scope_of(caller_of(request.scope))
        await self._call("resume_requests", None if scope.tenant is None else scope.owner)

    async def _is_paused(self, owner: str) -> bool:
        scopes: list[PauseScope] = await self._call("paused_scopes")
        return any(one.tenant is None or one.owner == owner for one in scopes)

    async def _call_in_time(self, verb: str, *args: Any) -> None:
        try:
            await self._call(verb, *args)
        except TimeoutError as error:
            what = f"{error}; choose mode=abort, or raise front_end.pause_timeout_s"
            raise ApiError(408, what) from error

    async def _call(self, verb: str, *args: Any) -> Any:
        return await self._frontend.client.call(verb, *args)

    async def _body(self, request: Request, kind: type[Form]) -> Form:
        return await read_json(request, kind, self._frontend)

    async def _query(self, request: Request, kind: type[Form], *lists: str) -> Form:
        """The values of the URL, with `lists` as lists.

        Raises ApiError for unknown or repeated names, wrong values, and values in the body.
        """
        values: dict[str, Any] = {}
        for name in request.query_params:
            given = request.query_params.getlist(name)
            if len(given) > 1 and name not in lists:
                raise bad_request(f"{name} is given twice; send one value", name)
            values[name] = given if name in lists else given[0]
        if request.method == "POST" and (unread := (await self._body(request, Unread)).model_extra):
            name, path = next(iter(unread)), request.url.path
            raise bad_request(f"{name} is read from the URL, not from the body: {path}?{name}=VALUE", name)
        try:
            return kind.model_validate(values)
        except ValidationError as error:
            raise describe_validation(error) from None


async def read_json(request: Request, kind: type[Form], frontend: Frontend) -> Form:
    """The values of a small JSON body, possibly empty.  Raises ApiError."""
    async with body_of(request, frontend.limits, SMALL_BODY_BYTES) as content:
        return await parse_json(content, kind)


async def parse_json(content: bytearray, kind: type[Form]) -> Form:
    """The values of a body.  Raises ApiError."""
    try:
        return kind.model_validate(await in_daemon_thread(json.loads, content) if content else {})
    except ValidationError as error:
        raise describe_validation(error) from None
    except (ValueError, RecursionError):
        raise bad_request(NOT_JSON) from None
