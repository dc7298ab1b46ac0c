"""Constrained output as requests ask for it: a grammar for the engine, or a 400 that says why."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from turnstile.server.answer.schemas import GenerationRequest
from turnstile.server.errors import ApiError, bad_request, sentence
from turnstile.server.tenants import Tenant
from turnstile.server.threads import Threads
from turnstile.text.errors import GrammarError, UncheckedGrammarError
from turnstile.text.grammar_request import (
    grammar_of_response_format,
    grammar_of_structured_outputs,
    json_object,
)

logger = logging.getLogger("turnstile.server")

_JSON_OBJECT = json_object()
_RETRY_AFTER = 10.0
"""Seconds after which a check that the machine had no room for may be tried again."""


def check_threads() -> Threads:
    """The threads that wait for checks of new grammars. Each may take seconds of a processor; two
    at once leave the others to the model.
    """
    return Threads("turnstile-grammar", number=2, most=32, heavy=1, what="new grammars")


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar that the output must match, and the field that asks for it."""

    grammar: str
    field: str


def constraint_of(request: GenerationRequest) -> Constraint | None:
    """The constraint on the output, or None. Raises :class:`ApiError` 400."""
    param = "response_format"
    try:
        grammar = grammar_of_response_format(request.response_format)
        if request.structured_outputs is not None:
            if grammar is not None:
                raise bad_request("Send response_format or structured_outputs, not both.", param)
            param = "structured_outputs"
            grammar = grammar_of_structured_outputs(request.structured_outputs)
    except GrammarError as error:
        raise grammar_refusal(error, param) from None
    return None if grammar is None else Constraint(grammar, param)


async def check(constraint: Constraint, checks: Threads, tenant: Tenant) -> None:
    """See that a constraint can be honoured; a new one in the turn of ``tenant``.

    A grammar is compiled once before it is accepted, off the event loop and in a process of its
    own, so that one that cannot be honoured is a 400 and not a failure later. Raises
    :class:`ApiError`, 503 where too many new ones are waiting for that or the machine has no room
    for it.
    """
    try:
        await _check(constraint.grammar, checks, tenant)
    except GrammarError as error:
        raise grammar_refusal(error, constraint.field) from None
    except UncheckedGrammarError as error:
        logger.warning("%s", sentence(error))
        raise ApiError(
            503,
            sentence(error) + " Try again later.",
            param=constraint.field,
            code="engine_overloaded",
            kind="overloaded",
            retry_after=_RETRY_AFTER,
        ) from None


async def _check(grammar: str, checks: Threads, tenant: Tenant) -> None:
    from turnstile.text.grammar import check_grammar, is_checked  # numpy: only where it is wanted

    if grammar == _JSON_OBJECT:
        return  # ours, and the one asked for most
    if is_checked(grammar):
        check_grammar(grammar)  # those who send what is known wait for nobody
        return
    gone = threading.Event()
    try:
        await checks.run(1, lambda: check_grammar(grammar, gone), tenant)
    finally:
        gone.set()


def grammar_refusal(error: GrammarError, param: str) -> ApiError:
    """400 for a grammar that cannot be used."""
    return bad_request(sentence(error), param)
