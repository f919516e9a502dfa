"""Loading and unloading adapters while serving, as vLLM's endpoints do."""

from __future__ import annotations

import os

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from moe_lora.core.errors import AdapterExistsError
from moe_lora.core.request import name_problem

from .errors import ApiError, bad_request, to_api_error
from .frontend import Frontend
from .protocol import LoadAdapterRequest, UnloadAdapterRequest

CONFIG_FILE = "adapter_config.json"


def check_name(name: str) -> None:
    """Raises ApiError for names that can't be served."""
    if problem := name_problem(name):
        raise bad_request(f"lora_name {problem}", "lora_name")


def check_new_name(name: str, frontend: Frontend) -> None:
    """Raises ApiError for names that no adapter can have."""
    check_name(name)
    if name == frontend.model_name:
        raise bad_request(f"lora_name {name!r} is the base model's name; choose another", "lora_name")


def check_files(path: str) -> None:
    """Raises ApiError 400 for an empty path, 404 where no adapter lies."""
    if not path:
        raise bad_request("lora_path is empty; give the directory of a PEFT adapter", "lora_path")
    if not os.path.isfile(os.path.join(path, CONFIG_FILE)):
        problem = f"has no {CONFIG_FILE}" if os.path.isdir(path) else "is not a directory on the server"
        raise ApiError(404, f"no LoRA adapter found: {path!r} {problem}", "lora_path")


def adapters_router(frontend: Frontend) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["adapters"])

    @router.post("/load_lora_adapter", response_class=PlainTextResponse, response_model=None)
    async def load_lora_adapter(body: LoadAdapterRequest) -> Response:
        """Serve the PEFT adapter in `lora_path` as `lora_name`; with `load_inplace`, as its new version.

        Without `lora_path` it is the adapter that the registry has under that name.
        """
        check_new_name(body.lora_name, frontend)
        path = await _find(body, frontend)
        try:
            await frontend.client.load_adapter(body.lora_name, path, replace=body.load_inplace)
        except FileNotFoundError as error:
            raise ApiError(404, f"no LoRA adapter found: {error}", "lora_path") from error
        except AdapterExistsError as error:
            how = "unload it first, or send load_inplace=true to replace it"
            raise bad_request(f"adapter {body.lora_name!r} is already loaded; {how}", "lora_name") from error
        except OSError as error:
            raise bad_request(f"the files in {path!r} can't be read: {error}") from error
        except Exception as error:
            raise to_api_error(error) from error
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/unload_lora_adapter", response_class=PlainTextResponse, response_model=None)
    async def unload_lora_adapter(body: UnloadAdapterRequest) -> Response:
        """Refuse new requests for `lora_name`, let running ones end, free its memory."""
        check_name(body.lora_name)
        await frontend.client.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router


async def _find(body: LoadAdapterRequest, frontend: Frontend) -> str:
    """Where the adapter's files lie.  Raises ApiError, and what `ServedRegistry.resolve` raises."""
    if body.lora_path is not None:
        check_files(body.lora_path)
        return body.lora_path
    if frontend.registry is None:
        raise bad_request(
            "lora_path is missing; give the directory of a PEFT adapter, or start the server with --registry",
            "lora_path",
        )
    return (await frontend.registry.resolve(body.lora_name)).path
