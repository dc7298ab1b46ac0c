"""``turnstile VERB --help=WORD``: of the many flags, those that have to do with a word."""

from __future__ import annotations

from collections.abc import Sequence

from cyclopts import App, Argument, Group


def find_flags(app: App, verb: str, word: str) -> list[tuple[str, str]]:
    """Flags of ``verb`` whose name, group or help has ``word`` in it, with their help."""
    wanted = word.lower()
    found = []
    for argument in app[verb].assemble_argument_collection(parse_docstring=True):
        parameter = argument.parameter
        if not argument.show or argument.name == "*":
            continue
        texts = (*argument.names, parameter.help or "", *_groups(argument))
        if any(wanted in text.lower().replace("_", "-") for text in texts):
            found.append((" ".join(argument.names), " ".join((parameter.help or "").split())))
    return found


def _groups(argument: Argument) -> Sequence[str]:
    group = argument.parameter.group
    groups = [group] if isinstance(group, str | Group) else list(group or ())
    return [each if isinstance(each, str) else each.name for each in groups]


def show(flags: Sequence[tuple[str, str]]) -> None:
    """Print what was found."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", max_width=40)
    table.add_column()
    for name, text in flags:
        table.add_row(escape(name), escape(text))
    Console(highlight=False).print(table)
