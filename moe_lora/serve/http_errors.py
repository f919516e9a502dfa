# SPDX-License-Identifier: Apache-2.0
"""Errors as OpenAI error bodies; a client's errors are 4xx."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from anyio import move_on_after
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moe_lora.core.errors import (
    AdapterError,
    AdapterExistsError,
    AdapterFailedError,
    AdapterNotFoundError,
    AdapterVersionError,
    BusyError,
    CapacityError,
    EngineDeadError,
    LoraServerError,
    MoeLoraError,
    PeerUnreachableError,
    RegistryError,
    StorageError,
    UnreadError,
)

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
BUSY_S = 5
"""`Retry-After` of a `BusyError`."""
STATUS_OF_ERROR: tuple[tuple[type[Exception], int], ...] = (
    (AdapterNotFoundError, 404),
    (AdapterExistsError, 400),
    (AdapterError, 400),
    (AdapterFailedError, 503),
    (StorageError, 503),
    (UnreadError, 408),
    (CapacityError, 400),
    (BusyError, 503),
    (AdapterVersionError, 503),
    (EngineDeadError, 503),
    (LoraServerError, 503),
    (PeerUnreachableError, 503),
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
    **dict.fromkeys(("guided_json", "json_schema"), "a JSON schema as an object, or as text"),
    "tool_choice": 'none, auto, required, or {"type": "function", "function": {"name": ...}}',
}
"""Accepted forms of fields with several forms."""


CONTROLLERS_PATHS = ("/load_lora_adapter", "/unload_lora_adapter")
MESSAGES = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
"""Paths of Anthropic's interface."""
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
NOT_JSON = "the body must be a JSON object, sent with Content-Type: application/json"
MAX_MESSAGE_CHARS = 1000
"""Limit of a message: a client's input is never returned whole."""


class ApiError(Exception):
    """An answer other than 200.

    param: the field at fault.  closes: closes the connection, with the request unread.  limit: reason to
    count (of `limits.REFUSALS`); None: already counted, or no refusal.  kind, code: None: the status'
    defaults.
    """

    kind: ClassVar[str | None] = None
    code: ClassVar[str | None] = None

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        retry_s: int | None = None,
        closes: bool = False,
        limit: str | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[:MAX_MESSAGE_CHARS] + "…"
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param if param is None else param[:MAX_MESSAGE_CHARS]
        self.retry_s = retry_s
        self.closes = closes
        self.limit = limit

    def __reduce__(self) -> Any:
        made = partial(type(self), retry_s=self.retry_s, closes=self.closes, limit=self.limit)
        return made, (self.status, self.message, self.param)

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The error with a client's names.  names: own field -> client's field.

        A name without "_" is also a word: a field only where messages name fields.
        """
        self.param = names.get(self.param or "", self.param)
        for name, given in names.items():
            start = "" if "_" in name else "(?:^|(?<=; )|(?<=leave )|(?<=did you mean )|(?<=shorten ))"
            self.message = re.sub(rf"{start}\b{name}\b", given, self.message)
        return self

    @property
    def body(self) -> dict[str, Any]:
        kind = ERROR_TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        error = {
            "message": self.message,
            "type": self.kind or kind,
            "param": self.param,
            "code": self.code or self.status,
        }
        return {"error": error}

    def body_for(self, path: str) -> dict[str, Any]:
        """The body in the path's form."""
        if path in MESSAGES:
            return anthropic_body(self)
        if path.endswith(CONTROLLERS_PATHS):
            return {"object": "error", **self.body["error"], **self.body}
        return self.body

    @property
    def headers(self) -> dict[str, str]:
        found = {} if self.retry_s is None else {"Retry-After": str(self.retry_s)}
        return {**found, "Connection": "close"} if self.closes else found


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """The error in Anthropic's form."""
    usual = "invalid_request_error" if error.status < 500 else "api_error"
    kind = ANTHROPIC_TYPES.get(error.status, usual)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class ContextLengthError(ApiError):
    """Prompt and answer exceed the context; by this code clients choose a longer model."""

    code = "context_length_exceeded"


class AlreadyLoadedError(ApiError):
    """An adapter has the name; controllers treat this type as success."""

    kind = "InvalidUserInput"


def to_json(content: Any) -> bytes:
    """Plain ASCII JSON for any characters."""
    try:
        found = msgspec.json.encode(content)
    except UnicodeEncodeError:  # half of a surrogate pair
        whole = msgspec.to_builtins(content, enc_hook=msgspec.json.decode)
        return json.dumps(whole, separators=(",", ":")).encode()
    return found if found.isascii() else _NOT_ASCII.sub(_escaped, found)


_NOT_ASCII = re.compile(rb"[\x80-\xff]+")


def _escaped(found: re.Match[bytes]) -> bytes:
    return json.dumps(found[0].decode())[1:-1].encode()


class JsonResponse(Response):
    """A response with `to_json` of its content."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


LINGER_S = 1.0
LINGER_BYTES = 64 << 20
"""Limits on reads after a closing answer."""


class LastAnswer(JsonResponse):
    """The answer to a partly read request; then the connection closes.

    The rest is read first: a close during the client's send would lose the answer.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        num_bytes = 0
        with move_on_after(LINGER_S):
            while num_bytes < LINGER_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    break
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def bad_request(message: str, param: str | None = None, limit: str | None = None) -> ApiError:
    return ApiError(400, message, param, limit=limit)


def to_api_error(error: Exception) -> ApiError:
    """The answer to an engine's error (see `EngineClient`)."""
    if isinstance(error, ApiError):
        return error
    for kind, status in STATUS_OF_ERROR:
        if isinstance(error, kind):
            return ApiError(status, str(error), retry_s=BUSY_S if kind is BusyError else None)
    logger.error("request failed", exc_info=error)
    return ApiError(500, f"the server failed: {type(error).__name__}; see its log")


def describe_validation(error: RequestValidationError | ValidationError) -> ApiError:
    """One line for the first problems, without the given values."""
    lines: dict[str, None] = {}
    param = None
    for field, problems in _by_field(error).items():
        kinds = {problem["type"] for problem in problems}
        if "json_invalid" in kinds:
            return bad_request(f"the body is not valid JSON: {problems[0].get('ctx', {}).get('error', '')}")
        if not field and kinds & WRONG_TYPE:
            return bad_request(NOT_JSON)
        param = param or field or getattr(_cause(problems[0]), "param", None)
        lines.update(dict.fromkeys(_lines(field, problems)))
    shown = list(lines)
    if len(shown) > MAX_REPORTED_PROBLEMS:
        shown[MAX_REPORTED_PROBLEMS:] = [f"and {len(shown) - MAX_REPORTED_PROBLEMS} more problems"]
    return bad_request("; ".join(shown), param)


def _by_field(error: RequestValidationError | ValidationError) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    problem: Any
    for problem in error.errors():
        place = [part for part in problem["loc"] if part != "body"]
        found.setdefault(str(place[0]) if place else "", []).append(problem)
    return found


def _lines(field: str, problems: list[dict[str, Any]]) -> list[str]:
    """A line per problem; for several forms, problems within a form, else the forms."""
    if not any(_names_form(part) for problem in problems for part in problem["loc"]):
        return [_line(problem) for problem in problems]
    telling = [problem for problem in problems if problem["type"] not in WRONG_TYPE]
    if not telling and field in FORMS:
        return [f"{field}: allowed are {FORMS[field]}"]
    return [_line(problem) for problem in telling or problems]


def _line(problem: dict[str, Any]) -> str:
    place = ".".join(str(part) for part in problem["loc"] if part != "body" and not _names_form(part))
    what = str(_cause(problem) or problem["msg"])
    return f"{place}: {what}" if place else what


def _names_form(part: str | int) -> bool:
    return isinstance(part, str) and ("[" in part or part in ("str", "int"))


def _cause(problem: dict[str, Any]) -> Exception | None:
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
        else:
            failure = ApiError(500, f"the server failed: {type(error).__name__}; see its log")
        kind = LastAnswer if failure.closes else JsonResponse
        return kind(
            failure.body_for(request.url.path), status_code=failure.status, headers=headers or failure.headers
        )

    for kind in (ApiError, MoeLoraError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
