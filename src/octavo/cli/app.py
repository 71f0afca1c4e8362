"""The commands under one name. Imports no more than typer needs to show their help, so that `--help` is quick.

Knows nothing of what a command does.
"""

from __future__ import annotations

from typing import Annotated

import typer

from octavo import __version__
from octavo.cli.batch import batch
from octavo.cli.chat import chat
from octavo.cli.demo import demo
from octavo.cli.generate import generate
from octavo.cli.lab import lab
from octavo.cli.models import models
from octavo.cli.options import grouped
from octavo.cli.plan import plan
from octavo.cli.serve import serve
from octavo.cli.top import top

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": 120},
)
for command in (generate, chat, batch, serve, top, models, plan, demo):
    app.command()(grouped(command))
app.add_typer(lab, name="lab")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"octavo {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def octavo(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run language models whose KV cache is virtual memory.

    Try [bold]octavo demo[/bold], then [bold]octavo chat[/bold]. Every command explains itself with --help.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
