"""Parts of the lab in a terminal, with rich."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table as RichTable

from turnstile.lab.story import Part, Plot, Table, show_cell


def tell(part: Part, console: Console) -> None:
    """Print a part: its sentences, tables and claims (plots are for the page)."""
    console.print()
    console.print(Rule(f"[bold]{escape(part.title)}[/bold]", align="left"))
    for block in part.blocks:
        if isinstance(block, Plot):
            continue
        console.print()
        if isinstance(block, Table):
            console.print(_table(block))
            if block.note:
                console.print(f"[dim]{escape(block.note)}[/dim]")
        else:
            console.print(escape(block))
    if part.claims:
        console.print()
    for claim in part.claims:
        mark = "[green]holds[/green]" if claim.holds else "[bold red]FAILS[/bold red]"
        console.print(f"  {mark}  {escape(claim.text)}")


def _table(table: Table) -> RichTable:
    shown = RichTable(title=escape(table.title), title_justify="left", title_style="bold")
    for i, column in enumerate(table.columns):
        shown.add_column(escape(column), justify="left" if i == 0 else "right", no_wrap=i == 0)
    for row in table.rows:
        shown.add_row(*(escape(show_cell(cell)) for cell in row))
    return shown
