"""The ``holdfast`` command line. Each subcommand is defined next to the code that it runs."""

from __future__ import annotations

import errno
import logging
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from holdfast import __version__
from holdfast.bench.command import bench
from holdfast.core.contract import NUMERICS_VERSION
from holdfast.core.errors import HoldfastError
from holdfast.demo.command import demo
from holdfast.proof.command import verify
from holdfast.proof.explain import explain
from holdfast.proof.fuzz.command import fuzz
from holdfast.proof.kernel_mutants.command import mutants
from holdfast.proof.listing import plans
from holdfast.proof.warmup import warmup


class _Commands(TyperGroup):
    """A group of commands that prints the message of an error and exits with status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except HoldfastError as error:
            message = str(error)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            message = f"{error.filename or 'a file'} cannot be used: {error.strerror or error}."
        Console(stderr=True).print(f"[red]error[/] {escape(message)}", soft_wrap=True, highlight=False)
        raise typer.Exit(2)


app = typer.Typer(
    cls=_Commands, help="Deterministic kernels: list them, show which one would run, verify and time them.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip
for command in (plans, explain, warmup, verify, fuzz, mutants, bench, demo):
    app.command()(command)


def _show_version(requested: bool) -> None:
    if requested:
        print(f"holdfast {__version__}, numerics version {NUMERICS_VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    logging.getLogger("holdfast").setLevel(logging.ERROR)  # commands print their own progress


def main() -> None:
    """Entry point of the ``holdfast`` command."""
    app()
