"""What goes wrong, as OpenAI's clients expect to hear it: a status and {"error": {message, type, param, code}}.

Knows no engine. https://platform.openai.com/docs/guides/error-codes
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from octavo.errors import OctavoError, RequestError

logger = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}
_NAMES = {"width": "best_of", "include_stop": "include_stop_str_in_output"}  # what the engine calls otherwise
# What pydantic finds wrong, by its name for it, in our words.
_MUST = {
    "too_short": "have at least {min_length} of them",
    "too_long": "have at most {max_length} of them",
    "string_too_short": "have at least {min_length} character(s)",
    "string_too_long": "have at most {max_length} characters",
    "string_pattern_mismatch": "match {pattern}",
    "greater_than": "be over {gt}",
    "greater_than_equal": "be at least {ge}",
    "less_than": "be under {lt}",
    "less_than_equal": "be at most {le}",
    "finite_number": "be a finite number",
    "literal_error": "be {expected}",
    "int_type": "be a whole number",
    "int_from_float": "be a whole number",
    "float_type": "be a number",
    "bool_type": "be true or false",
    "string_type": "be a text",
    "list_type": "be a list",
    "dict_type": "be an object",
    "model_type": "be an object",
    "model_attributes_type": "be an object",
}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_LONGEST_VALUE = 80  # characters of a wrong value that a message repeats


class ApiError(Exception):
    """Answered with this status; `param` names the parameter at fault, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """What is sent."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """In ASCII: a message may repeat what a client sent and no UTF-8 can hold, as half of a surrogate pair."""
        return Response(json.dumps(self.body()), self.status, self.headers, media_type="application/json")


class ClientGone(Exception):  # noqa: N818 (nothing is wrong)
    """The client has left; nobody is there to answer."""


def from_exception(error: BaseException) -> ApiError:
    """The answer to whatever was raised while a request was served."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=_NAMES.get(error.param or "", error.param))
    if isinstance(error, OctavoError):  # closed, or forked
        return ApiError(503, str(error), code="unavailable")
    logger.error("A request failed within the server.", exc_info=error)
    return _bug(error)


def _bug(error: BaseException) -> ApiError:
    return ApiError(500, f"The server failed: {type(error).__name__}.", code="internal_error")


def install(app: FastAPI) -> None:
    """Have every error of the app answered in OpenAI's shape."""

    async def on_api_error(_: Request, error: Exception) -> Response:
        return from_exception(error).response()

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _validation_error(error.errors(), request.headers.get("content-type")).response()

    async def on_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, ApiError):  # raised while FastAPI read the body
            return error.__cause__.response()
        return ApiError(error.status_code, _http_message(error), headers=error.headers).response()

    async def on_gone(_: Request, __: Exception) -> Response:
        return Response(status_code=499)  # nginx's number for it; only the log sees it

    async def on_bug(_: Request, error: Exception) -> Response:
        return _bug(error).response()  # which Starlette then raises again, for uvicorn to log

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ClientGone, on_gone)
    app.add_exception_handler(Exception, on_bug)
    for kind in (ApiError, OctavoError):
        app.add_exception_handler(kind, on_api_error)


def _http_message(error: HTTPException) -> str:
    if error.status_code == 404:
        return "There is nothing at this path; /openapi.json lists what there is."
    if error.status_code == 405:
        return f"This path does not take that method; it takes {(error.headers or {}).get('Allow', 'another')}."
    return str(error.detail) or HTTPStatus(error.status_code).phrase


def _validation_error(errors: Sequence[Any], content_type: str | None) -> ApiError:
    """One sentence on the first thing that is wrong with a body."""
    # Of a union all members complain; the one that got furthest into the value knows best what was meant, and one that
    # is not content with the value better than one that would have another type.
    error = max(errors, key=_tells)
    kind, param = error["type"], _spelled(error) or None
    if kind == "json_invalid":
        return ApiError(400, f"The body is no valid JSON: {error.get('ctx', {}).get('error', error['msg'])}.")
    if kind in ("extra_forbidden", "none_required"):
        return ApiError(400, f"The parameter {param} is not supported.", param=param, code="unsupported_parameter")
    if kind == "missing":
        missing = "A JSON body (Content-Type: application/json)" if param is None else f"The parameter {param}"
        return ApiError(400, f"{missing} is missing.", param=param, code="missing_required_parameter")
    if param is None and "json" not in (content_type or ""):
        sent = f"The body was sent as {content_type[:80]}" if content_type else "The body was sent without a type"
        return ApiError(400, f"{sent}; send it with Content-Type: application/json.", code="invalid_value")
    if kind == "string_unicode":
        message = f"{param or 'A name in the body'} holds half of a surrogate pair, which is no Unicode character."
        return ApiError(400, message, param=param, code="invalid_value")
    must = _MUST.get(kind, "").format_map(error.get("ctx", {}))
    said = f"it must {must}" if must else str(error["msg"]).removeprefix("Value error, ").rstrip(".")
    value = _shown(error.get("input"))
    message = f"{param or 'The body'} is {value}; {said[:1].lower()}{said[1:]}."
    return ApiError(400, message, param=param, code="invalid_value")


def _tells(error: Any) -> tuple[bool, int, bool]:
    """How much an error of validation tells, for `max`."""
    kind = error["type"]
    return kind == "extra_forbidden", len(error["loc"]), kind != "missing" and not kind.endswith("_type")


def _spelled(error: Any) -> str:
    """Where in a body an error is, as people write it: messages[0].content."""
    loc = error["loc"][1:]  # without "body", "path" or "query"
    stranger = len(loc) - 1 if error["type"] == "extra_forbidden" else None  # whose name may be anything
    text, before = "", None
    for place, part in enumerate(loc):
        if isinstance(part, int):
            text += f"[{part}]"
        elif place == stranger or not _is_member(part, before):
            text += f".{part[:_LONGEST_VALUE]}" if text else part[:_LONGEST_VALUE]
        before = part
    return text


def _is_member(part: str, before: int | str | None) -> bool:
    """Whether pydantic so calls a member of a union: by a role, a kind, a class, or list[...]."""
    named = (isinstance(before, int) and part in _ROLES) or before == "response_format"
    return named or not part.isidentifier() or part[0].isupper()


def _shown(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (ValueError, RecursionError):
        text = repr(type(value))
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
