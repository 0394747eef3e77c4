"""The application: its commands, how it logs, and how errors become exit codes."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated, cast

import typer

from genesis import __version__
from genesis.errors import GenesisError
from genesis.verbosity import add_verbosity, set_up_logging
from loader.cli import StoppedBySignal, bench, fetch, plan, verify
from loader.errors import LoaderError, LoaderUsageError
from manifests import ContractError

# typer brings its own copy of click since 0.27 and the real one before: this is the base of usage errors in either.
_CLICK_ERROR: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if issubclass(base, Exception) and base.__name__ == "ClickException"
)

_LOGGED = ("loader", "genesis", "manifests")
"""Packages whose logging the command line sets."""

app = typer.Typer(
    name="loader",
    help="What a training node reads: plan, fetch, verify and measure its shards (docs/loader.md).",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"loader {__version__}")
        raise typer.Exit


app.command("plan")(plan.plan_command)
app.command("fetch")(fetch.fetch_command)
app.command("verify")(verify.verify_command)
app.command("bench")(bench.bench_command)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code."""
    _set_up_output()
    command = typer.main.get_command(app)
    add_verbosity(command, _LOGGED)
    try:
        result = command.main(args=list(arguments), prog_name="python -m loader", standalone_mode=False)
    except _CLICK_ERROR as error:
        return _show(cast("typer.BadParameter", error))
    except StoppedBySignal as stopped:
        return _fail("stopped", stopped.exit_code)
    except LoaderUsageError as error:
        return _fail(str(error), 2)
    except (LoaderError, GenesisError, ContractError) as error:
        return _fail(str(error), 1)
    except OSError as error:
        # Whatever is still buffered would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 0  # The reader of our output (head, say) has seen enough.
        return _fail(f"cannot go on: {error.strerror or error}", 1)
    return result if isinstance(result, int) else 0


def _show(error: typer.BadParameter) -> int:
    error.show()
    return error.exit_code


def _fail(message: str, code: int) -> int:
    logging.getLogger("loader").debug("failed", exc_info=True)
    typer.echo(f"loader: {message}", err=True)
    return code


def _set_up_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # A node's id may not exist in the terminal's encoding.
    set_up_logging(_LOGGED)
