"""A process of its own that compiles one grammar from standard input, or dies trying.

A client's grammar can make the compiler run for minutes, take all memory, or recurse until the
stack ends, which kills the process it runs in. So the first to compile it is this one: a file
run by itself, with limits on CPU time, memory and stack well under those of the engine, that
answers with one JSON line: ``{"error": null}`` or ``{"error": "what is wrong"}``. An end without an
answer, by a limit or a crash, means that the grammar is too complex.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
from typing import Any

CPU_SECONDS = 3
MEMORY_BYTES = 1 << 30
STACK_BYTES = 2 << 20
MAX_ERROR_CHARS = 400


def parser_limits() -> Any:
    """Bounds for compiling and for every step after; the engine uses the same."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def complaint_of(message: str) -> str:
    """What the compiler says, for the client: without its name for it and its internal state."""
    said = message.split("\n<", 1)[0].strip()
    if said == "NoExtensionBias":
        said = "it matches no text at all"
    return said[:MAX_ERROR_CHARS]


def _compile(grammar: str) -> str | None:
    """Compile for a vocabulary of single bytes and ask what may come first: syntax, references
    and the lexer need no more, and a grammar that matches nothing shows in the first mask.
    """
    from llguidance import LLMatcher, LLTokenizer

    failed, messages = LLMatcher.validate_grammar_with_warnings(
        grammar, None, limits=parser_limits()
    )
    if failed:
        return complaint_of(messages[0])
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return complaint_of(str(matcher.get_error())) if matcher.is_error() else None


def main() -> None:
    """Read a grammar, compile it within bounds, print the verdict."""
    try:
        import resource

        # The soft limit's signal (SIGXCPU) tells this end from a kill by somebody else.
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        pass  # a system without these limits still has the caller's time-out
    importlib.import_module("llguidance")  # if it is broken, that is not the grammar's fault
    grammar = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    verdict: list[str | None] = []
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=lambda: verdict.append(_compile(grammar)))
    worker.start()
    worker.join()
    if verdict:
        print(json.dumps({"error": verdict[0]}))


if __name__ == "__main__":
    main()
