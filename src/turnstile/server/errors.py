"""Every refusal a client can get, as one type: :class:`ApiError`, in OpenAI's shape.

The body is ``{"error": {"message", "type", "param", "code", ...}}``. The retry contract of the
official clients is kept: ``Retry-After`` and ``retry-after-ms`` where waiting helps, and
``x-should-retry: false`` where the same request would fail again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import msgspec

from turnstile.engine.client import EngineState, EngineUnavailableError, NeverFitsError
from turnstile.engine.params import ParameterError
from turnstile.text.errors import MessageError

Headers = list[tuple[bytes, bytes]]

MAX_MESSAGE = 600
"""Characters of a message that reach the client: an error never echoes a large request."""

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_implemented_error",
    503: "server_error",
    504: "timeout_error",
}
_RETRIED_BY_CLIENTS = (408, 409, 429)
_FIELD = re.compile(r"[a-z]+[_.\[]\w")
"""A field's name that no word looks like: ``tool_choice``, ``tools[0]``, ``messages.0``."""


class ApiError(Exception):
    """An answer that is no answer.

    Attributes
    ----------
    status
        HTTP status.
    message
        A sentence for people: what is wrong and what to do.
    param
        The field at fault, dotted (``messages.0.role``), or None.
    code
        A word for programs (``context_length_exceeded``), or None.
    retry_after
        Seconds after which the same request may work; None where nobody knows or it never will.
    extra
        More keys for the error object.
    form
        What writes the body, where it is not to be OpenAI's.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        retry_after: float | None = None,
        should_retry: bool | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        extra: dict[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "…"
        self.param = param
        self.code = code
        self.kind = kind or _KINDS.get(status, "invalid_request_error")
        self.retry_after = retry_after
        self.should_retry = should_retry
        self.extra = extra or {}
        self.form: Callable[[ApiError], bytes] | None = None
        self._headers = headers

    def body(self) -> bytes:
        """The JSON error object, one line."""
        if self.form is not None:
            return self.form(self)
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
            **self.extra,
        }
        return msgspec.json.encode({"error": error})

    def headers(self) -> Headers:
        """Headers beside the usual ones: the retry contract, and what the raiser asked for."""
        headers = list(self._headers)
        if self.retry_after is not None:
            milliseconds = max(1, math.ceil(self.retry_after * 1000))
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after))))
            headers.append((b"retry-after-ms", b"%d" % milliseconds))
        retry = self.should_retry
        if retry is None and (self.status in _RETRIED_BY_CLIENTS or self.status >= 500):
            retry = self.retry_after is not None
        if retry is not None:
            headers.append((b"x-should-retry", b"true" if retry else b"false"))
        return headers


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400 for a field that is wrong."""
    return ApiError(400, message, param=param, code=code)


def message_refusal(error: MessageError) -> ApiError:
    """400 for what is wrong with a conversation or its tools; fields are dotted."""
    param = re.sub(r"\[(\w+)\]", r".\1", error.param) if error.param else None
    return bad_request(sentence(error), param)


def sentence(error: Exception) -> str:
    """What an error of the layers below says, as a sentence. A field keeps its name: where one
    begins it, there is no capital letter.
    """
    text = str(error)
    if not _FIELD.match(text):
        text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else text + "."


def unsupported(message: str, param: str) -> ApiError:
    """400 for a field this server knows and cannot honour: never ignored in silence."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def model_loading() -> ApiError:
    """503 while the weights are being read."""
    return ApiError(
        503,
        "The model is still loading. Try again in a moment.",
        code="model_loading",
        retry_after=1.0,
    )


def shutting_down() -> ApiError:
    """503 while draining; the connection is closed so that a balancer goes elsewhere."""
    return ApiError(
        503,
        "The server is shutting down and takes no new requests.",
        code="shutting_down",
        retry_after=1.0,
        headers=[(b"connection", b"close")],
    )


def deadline_exceeded() -> ApiError:
    """504 for a request whose time was over before its first token."""
    return ApiError(
        504,
        "The request's timeout passed before it could start.",
        code="deadline_exceeded",
        should_retry=False,
    )


def internal_error(message: str = "The server failed to answer this request.") -> ApiError:
    """500; what really happened is in the log, under the request id."""
    return ApiError(500, message, code="internal_error", should_retry=False)


def from_exception(error: Exception) -> ApiError | None:
    """The answer to an error of the layers below, or None for one nobody foresaw."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ParameterError):
        return bad_request(str(error), error.param)
    if isinstance(error, NeverFitsError):
        if error.limit == "max_num_seqs":
            return bad_request(str(error), "n")
        return ApiError(
            400, str(error), code="context_length_exceeded", extra={"limit": error.limit}
        )
    if isinstance(error, EngineUnavailableError):
        return _unavailable(error)
    return None


def _unavailable(error: EngineUnavailableError) -> ApiError:
    if error.state is EngineState.LOADING:
        return model_loading()
    if error.state is EngineState.DRAINING:
        return shutting_down()
    code = "engine_recovering" if error.state is EngineState.RECOVERING else "engine_dead"
    return ApiError(503, str(error), code=code, retry_after=error.retry_after or 1.0)
