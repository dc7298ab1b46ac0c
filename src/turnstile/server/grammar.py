"""Constrained output as requests ask for it: accepted where it can be honoured, else a 400."""

from __future__ import annotations

from turnstile.server.errors import bad_request, unsupported
from turnstile.server.model import ServedModel
from turnstile.server.schemas import GenerationRequest

_FORMATS = ("text", "json_object", "json_schema")


def grammar_of(request: GenerationRequest, model: ServedModel) -> str | None:
    """The constraint on the output, or None. Raises :class:`ApiError` 400 where it cannot be."""
    wanted = request.response_format
    if wanted is not None and wanted.type not in _FORMATS:
        raise bad_request(
            f"response_format.type must be one of {', '.join(_FORMATS)}.", "response_format"
        )
    if wanted is not None and wanted.type != "text":
        raise unsupported(
            f"response_format {wanted.type} is not supported yet; ask for JSON in the prompt.",
            "response_format",
        )
    if request.structured_outputs is not None:
        raise unsupported("structured_outputs is not supported yet.", "structured_outputs")
    return None
