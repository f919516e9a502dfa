"""Every error as an OpenAI error body; what a client caused is 4xx, never 500."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from moe_lora.core.errors import (
    AdapterError,
    AdapterExistsError,
    AdapterNotFoundError,
    AdapterVersionError,
    CapacityError,
    EngineDeadError,
    LoraServerError,
    MoeLoraError,
    RegistryError,
    StorageError,
)

logger = logging.getLogger(__name__)

ERROR_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
STATUS_OF_ERROR: tuple[tuple[type[Exception], int], ...] = (
    (AdapterNotFoundError, 404),
    (AdapterExistsError, 400),
    (AdapterError, 400),
    (StorageError, 503),
    (CapacityError, 400),
    (AdapterVersionError, 503),
    (EngineDeadError, 503),
    (LoraServerError, 503),
    (RegistryError, 503),
    (ValueError, 400),
)
MAX_REPORTED_PROBLEMS = 3
WRONG_TYPE = frozenset(
    {"bool_type", "dict_type", "float_type", "int_type", "list_type", "model_attributes_type", "model_type"}
    | {"missing", "string_type"}
)
FORMS = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "a text or a list of texts",
    "messages": "role and content, the content a text or a list of parts {type: text, text: ...}",
}
"""What fields that may have several forms accept."""


class ApiError(Exception):
    """An answer other than 200.  param: the request's field that caused it."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        kind = ERROR_TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return {"error": error}


def to_json(content: Any) -> bytes:
    """JSON in plain ASCII: encoding it can't fail, whatever characters a client sent.  Takes data classes."""
    with suppress(UnicodeEncodeError):
        found = msgspec.json.encode(content)
        if found.isascii():
            return found
    return json.dumps(msgspec.to_builtins(content), separators=(",", ":")).encode()


class JsonResponse(Response):
    """`to_json` of something."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param)


def to_api_error(error: Exception) -> ApiError:
    """What to answer for an error that an engine raised (see `EngineClient`)."""
    if isinstance(error, ApiError):
        return error
    for kind, status in STATUS_OF_ERROR:
        if isinstance(error, kind):
            return ApiError(status, str(error))
    logger.error("request failed", exc_info=error)
    return ApiError(500, f"the server failed: {type(error).__name__}; see its log")


def describe_validation(error: RequestValidationError) -> ApiError:
    """One line for the first few problems, without the values given, which may be huge or no text."""
    lines: dict[str, None] = {}
    param = None
    for field, problems in _by_field(error).items():
        kinds = {problem["type"] for problem in problems}
        if "json_invalid" in kinds:
            return bad_request(f"the body is not valid JSON: {problems[0].get('ctx', {}).get('error', '')}")
        if not field and kinds & WRONG_TYPE:
            return bad_request("the body must be a JSON object, sent with Content-Type: application/json")
        param = param or field or getattr(_cause(problems[0]), "param", None)
        lines.update(dict.fromkeys(_lines(field, problems)))
    shown = list(lines)
    if len(shown) > MAX_REPORTED_PROBLEMS:
        shown[MAX_REPORTED_PROBLEMS:] = [f"and {len(shown) - MAX_REPORTED_PROBLEMS} more problems"]
    return bad_request("; ".join(shown), param)


def _by_field(error: RequestValidationError) -> dict[str, list[dict[str, Any]]]:
    """The problems of each field of the body; "" for those of the body itself."""
    found: dict[str, list[dict[str, Any]]] = {}
    for problem in error.errors():
        place = [part for part in problem["loc"] if part != "body"]
        found.setdefault(str(place[0]) if place else "", []).append(problem)
    return found


def _lines(field: str, problems: list[dict[str, Any]]) -> list[str]:
    """One line per problem.  A field of several forms was held against each: only what is not about the
    form matters, or else the list of forms."""
    if not any(_names_form(part) for problem in problems for part in problem["loc"]):
        return [_line(problem) for problem in problems]
    telling = [problem for problem in problems if problem["type"] not in WRONG_TYPE]
    return [_line(problem) for problem in telling] or [f"{field}: allowed are {FORMS[field]}"]


def _line(problem: dict[str, Any]) -> str:
    place = ".".join(str(part) for part in problem["loc"] if part != "body" and not _names_form(part))
    what = str(_cause(problem) or problem["msg"])
    return f"{place}: {what}" if place else what


def _names_form(part: str | int) -> bool:
    """Whether a part of a problem's place is pydantic's name of a union's branch."""
    return isinstance(part, str) and ("[" in part or part in ("str", "int"))


def _cause(problem: dict[str, Any]) -> Exception | None:
    """The ValueError that one of our own checks raised."""
    cause = problem.get("ctx", {}).get("error")
    return cause if isinstance(cause, Exception) else None


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception with an OpenAI error body."""

    async def answer(request: Request, error: Exception) -> Response:
        headers = None
        if isinstance(error, RequestValidationError):
            failure = describe_validation(error)
        elif isinstance(error, HTTPException):
            failure = ApiError(error.status_code, f"{error.detail} ({request.method} {request.url.path})")
            headers = error.headers
        elif isinstance(error, MoeLoraError | ApiError):
            failure = to_api_error(error)
        else:  # the server logs it
            failure = ApiError(500, f"the server failed: {type(error).__name__}; see its log")
        return JsonResponse(failure.body, status_code=failure.status, headers=headers)

    for kind in (ApiError, MoeLoraError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
