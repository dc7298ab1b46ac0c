"""The command line. Verbs are imported when they are used, so that ``--help`` is quick."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from cyclopts import App, Parameter
from cyclopts.exceptions import CycloptsError, UnknownOptionError

from turnstile import __version__
from turnstile.cli import settings

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

VERBS = {
    "serve": "Serve a model over HTTP, with OpenAI's API.",
    "chat": "Talk to a running server in the terminal.",
    "complete": "Send one prompt to a running server and print what comes.",
    "run-batch": "Answer the requests in a file, in OpenAI's batch format.",
    "pull": "Fetch a model, so that serving starts at once.",
    "inspect": "Say what is in a model, and what serving it takes.",
    "doctor": "Check this machine, and say what would keep Turnstile from serving well.",
    "export-tokenizer": "Write a model's tokenizer as a Hugging Face directory.",
    "bench": "Measure a server: load and latency, sweeps, the whole suite, comparisons.",
    "simulate": "Run the scheduler on virtual time.",
    "lab": "See what each mechanism is for: with it and without it, side by side.",
}


def make_app() -> App:
    """The command with all its verbs, none of them imported yet."""
    app = App(
        name="turnstile",
        version=__version__,
        help="Serve language models to many people at once, predictably.",
        help_epilogue="Flags may also be set in the environment: --flag of verb as "
        "TURNSTILE_VERB_FLAG.",
        help_format="markdown",
        result_action="return_value",
        # TURNSTILE_VERB_FLAG, told once at the end of a page instead of at every flag.
        default_parameter=Parameter(show_env_var=False, negative_iterable=()),
    )
    for verb, summary in VERBS.items():
        app.command(f"turnstile.cli.{verb.replace('-', '_')}:app", name=verb, help=summary)
    return app


def main(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code.

    What goes wrong is told in one line on standard error; ``--debug`` shows the traceback. The code
    is 2 where what was given cannot work (flags, variables, files of settings), whatever the
    machine does: to try again is of no use, and a service manager should not. Else it is 1.
    """
    tokens = [token for token in arguments if token != "--debug"]
    debug = len(tokens) < len(arguments)
    try:
        result = _run(tokens)
    except CycloptsError as error:
        if debug:
            raise
        text = settings.explain(error) if isinstance(error, UnknownOptionError) else None
        return _complain(f"{text or error} (turnstile --help)", EXIT_USAGE)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads us any more; there is nothing left to say
        return EXIT_FAILED
    except Exception as error:
        if debug:
            raise
        return _complain(describe(error), EXIT_USAGE if _is_usage(error) else EXIT_FAILED)
    return result if isinstance(result, int) else 0


def _run(tokens: Sequence[str]) -> object:
    app = make_app()
    verb = tokens[0] if tokens and tokens[0] in VERBS else ""
    word = next((t.partition("=")[2] for t in tokens if t.startswith("--help=")), None)
    if verb and word:
        return _search(app, verb, word)
    rest, path = settings.take_config(tokens, verb or "turnstile")
    if verb:
        app.config = settings.sources(path, verb)
    return app(settings.normalize(rest), print_error=False, exit_on_error=False)


def _search(app: App, verb: str, word: str) -> int:
    from turnstile.cli.help_search import find_flags, show

    found = find_flags(app, verb, word)
    if not found:
        return _complain(f"No flag of {verb} has to do with {word!r}.", EXIT_USAGE)
    show(found)
    return 0


def _is_usage(error: Exception) -> bool:
    """Whether it complains of what was given: such errors of ours are values that are wrong."""
    return isinstance(error, ValueError) and _is_ours(error)


def _is_ours(error: Exception) -> bool:
    return type(error).__module__.startswith("turnstile.")


def describe(error: Exception) -> str:
    """One line for people: our own errors are sentences already, others get their type's name."""
    text = " ".join(str(error).split())
    if _is_ours(error):
        return text
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"This needs the package {error.name}, which is not installed."
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}."
    return f"{type(error).__name__}: {text} (--debug shows where)"


def _complain(message: str, code: int) -> int:
    print(f"turnstile: {message}", file=sys.stderr)
    return code


def run() -> None:
    """Entry point of the ``turnstile`` command."""
    if os.getpid() == 1:
        # Nobody's default for SIGTERM holds for the first process of a container: until the server
        # handles signals itself (a model may have to be fetched first) it could not be stopped.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
