"""Chat templates: Jinja as Hugging Face runs it, in a sandbox with bounds.

The environment has what ``transformers`` gives a template (immutable sandbox, trimmed blocks,
``break`` and ``continue``, ``tojson`` that does not escape HTML, ``raise_exception``,
``strftime_now``, the ``generation`` tag), so that the same template makes the same text.

A template is part of a model, and a model is a download. The sandbox keeps it from the machine;
the bounds below keep it from taking all time and memory: iterations and calls, the length of
ranges and of the output, and of whatever an operator, a method or a filter would make
(:mod:`turnstile.text.template_sizes`). They are no proof against a determined author, which is why
templates in requests are refused by default.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from turnstile.text import template_sizes
from turnstile.text.errors import TemplateError

MAX_SOURCE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 64 << 20
MAX_ITERATIONS = 2_000_000
_CALL_COST = 10
"""Iterations that a call counts as: two calls in a macro of itself are a loop without ``for``."""
_CHARS_PER_ITERATION = 512
"""Making so much counts as one: a gigabyte in all, in whatever pieces."""
_BOUNDED = "_bounded"

_JOINED = "_joined"


@dataclass(slots=True)
class _Budget:
    iterations: int


_budget: ContextVar[_Budget] = ContextVar("budget")


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:  # noqa: A002 - the name templates use
    return datetime.now().strftime(format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _bounded(items: Iterable[Any]) -> Iterable[Any]:
    """Charge a loop's iterations to the rendering, as the loop starts."""
    sized = items if hasattr(items, "__len__") else list(items)
    _charge(len(sized))  # type: ignore[arg-type]
    return sized


def _charge(iterations: int) -> None:
    budget = _budget.get()
    budget.iterations -= iterations
    if budget.iterations < 0:
        raise jinja2.TemplateError("the chat template loops without end")


def _allow(size: float) -> None:
    """Charge something of this size to the rendering, before it is made."""
    if size > template_sizes.MOST:
        raise jinja2.TemplateError("the chat template makes a value that is too large")
    _charge(int(size) // _CHARS_PER_ITERATION)


def _joined(*parts: object) -> str:
    """What ``~`` does, with an eye on the length."""
    _allow(sum(map(template_sizes.of_text, parts)))
    return "".join([str(part) for part in parts])


def _finalized(value: object) -> object:
    """What is written out; a list is written as text, which may be much longer."""
    if not isinstance(value, str):
        _allow(template_sizes.of_text(value))
    return value


def _sized(function: Callable[..., Any], size: template_sizes.Size) -> Callable[..., Any]:
    """A filter that is asked for nothing larger than is allowed."""
    first = int(hasattr(function, "jinja_pass_arg"))  # what Jinja passes stands before the value

    @wraps(function)
    def sized(*args: Any, **named: Any) -> Any:
        passed, value, rest = args[:first], args[first], args[first + 1 :]
        if isinstance(value, Iterator):  # of another filter: to be measured, and then read again
            value = list(value)
        _allow(size(value, *rest, **named))
        return function(*passed, value, *rest, **named)

    return sized


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's words for training: here it
    stands for its body.
    """

    tags = {"generation"}  # noqa: RUF012 - declared so by Extension

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _allow(template_sizes.of_operation(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **named: Any) -> Any:
        _charge(_CALL_COST)
        if isinstance(function, LoopContext) and args:  # {% for … recursive %} begins anew
            args = (_bounded(args[0]), *args[1:])
        _allow(template_sizes.of_call(function, args, named))
        return super().call(context, function, *args, **named)


def _make_environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, loopcontrols],
        finalize=_finalized,
    )
    environment.filters["tojson"] = _tojson
    for name, size in template_sizes.FILTERS.items():
        environment.filters[name] = _sized(environment.filters[name], size)
    # Any number of random words, and links in any number of words: for nobody's chat.
    del environment.globals["lipsum"], environment.filters["urlize"]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals[_BOUNDED] = _bounded
    environment.globals[_JOINED] = _joined
    return environment


_environment = _make_environment()


def _with_bounds(tree: nodes.Template) -> nodes.Template:
    """Route every loop through :func:`_bounded` and every ``~`` through :func:`_joined`."""
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = _call(_BOUNDED, [loop.iter], loop.lineno)
    _Concats().visit(tree)
    # A parsed tree carries its environment in every node; the new ones need it too.
    tree.set_environment(_environment)
    return tree


def _call(name: str, arguments: list[Any], lineno: int) -> nodes.Call:
    call = nodes.Call(nodes.Name(name, "load"), arguments, [], None, None)
    call.set_lineno(lineno)
    return call


class _Concats(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802 - Jinja's naming
        self.generic_visit(node)
        return _call(_JOINED, node.nodes, node.lineno)


class CompiledTemplate:
    """A template ready to render. ``source`` is kept for questions about what it can do."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateError(f"the chat template is longer than {MAX_SOURCE_CHARS} characters")
        self.source = source
        try:
            code = _environment.compile(_with_bounds(_environment.parse(source)))
            self._template = jinja2.Template.from_code(
                _environment, code, _environment.make_globals(None)
            )
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template is not valid Jinja (line {error.lineno}): {error.message}"
            ) from None
        except (RecursionError, MemoryError):
            raise TemplateError("the chat template is nested too deeply") from None
        except (SyntaxError, ValueError) as error:  # Python's bounds on blocks and on digits
            reason = error.msg if isinstance(error, SyntaxError) else error
            raise TemplateError(f"the chat template cannot be compiled: {reason}") from None

    def mentions(self, *words: str) -> bool:
        """Whether any of the words stands in the source."""
        return any(word in self.source for word in words)

    def render(self, variables: Mapping[str, Any]) -> str:
        """Render to text.

        Raises :class:`TemplateError` with the template's own message where it refuses its
        input, and with a general one where it fails on it; :class:`TemplateTypeError` where a
        value was of a type it cannot use.
        """
        token = _budget.set(_Budget(MAX_ITERATIONS))
        try:
            return self._collect(self._template.generate(variables))
        except jinja2.exceptions.SecurityError:
            raise TemplateError("the chat template tries to do what the sandbox forbids") from None
        except jinja2.UndefinedError as error:
            raise TemplateError(f"the chat template needs what is not there: {error}") from None
        except jinja2.TemplateError as error:
            raise TemplateError(_short(str(error))) from None
        except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            raise TemplateTypeError(
                f"the chat template cannot render these messages ({_short(str(error))})"
            ) from None
        except (RecursionError, MemoryError, ArithmeticError):
            raise TemplateError("the chat template uses too much memory or depth") from None
        except TemplateError:
            raise
        except Exception as error:  # it is a program of somebody else's: anything may come of it
            raise TemplateError(f"the chat template fails ({type(error).__name__})") from None
        finally:
            _budget.reset(token)

    @staticmethod
    def _collect(pieces: Iterable[str]) -> str:
        parts, length = [], 0
        for piece in pieces:
            parts.append(piece)
            length += len(piece)
            if length > MAX_OUTPUT_CHARS:
                raise TemplateError(f"the rendered chat is over {MAX_OUTPUT_CHARS} characters")
        return "".join(parts)


class TemplateTypeError(TemplateError):
    """The template failed on the type of a value, where it has not refused it by itself."""


def _short(message: str) -> str:
    return message if len(message) <= 500 else message[:500] + "…"


@lru_cache(maxsize=32)
def compile_template(source: str) -> CompiledTemplate:
    """Compile a template, or take it from the cache (compiling takes milliseconds).

    Raises :class:`TemplateError` where it is no valid Jinja.
    """
    return CompiledTemplate(source)
