"""The application: its commands, how it logs, and how errors become exit codes."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated, cast

import typer

from genesis import __version__
from genesis.cli import export, inspect, keygen, learn, populate, serve, sources, status, verify
from genesis.cli.plugins import add_plugins
from genesis.errors import GenesisError, InterruptedRunError, UnknownSourceError, UsageError
from manifests import ContractError

# typer brings its own copy of click since 0.27 and the real one before: this is the base of usage errors in either.
_CLICK_ERROR: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if issubclass(base, Exception) and base.__name__ == "ClickException"
)

app = typer.Typer(
    name="genesis",
    help="Turn web text into token shards that training nodes can trust.",
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
        typer.echo(f"genesis {__version__}")
        raise typer.Exit


app.command("populate")(populate.populate_command)
app.command("learn")(learn.learn_command)
app.command("status")(status.status_command)
app.command("verify")(verify.verify_command)
app.command("serve")(serve.serve_command)
app.command("sources")(sources.sources_command)
app.command("keygen")(keygen.keygen_command)
app.add_typer(inspect.app, name="inspect")
app.add_typer(export.app, name="export")


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code."""
    _set_up_logging()
    add_plugins(app, arguments)
    try:
        result = app(args=list(arguments), prog_name="genesis", standalone_mode=False)
    except _CLICK_ERROR as error:
        return _show(cast("typer.BadParameter", error))
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    except (UsageError, UnknownSourceError) as error:
        return _fail(str(error), 2)
    except InterruptedRunError as error:
        return _fail(str(error), 130)
    except (GenesisError, ContractError) as error:
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
    logging.getLogger("genesis").debug("failed", exc_info=True)
    typer.echo(f"genesis: {message}", err=True)
    return code


def _set_up_logging() -> None:
    level = os.environ.get("GENESIS_LOG", "INFO").upper()
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    logging.getLogger("genesis").setLevel(level if level in logging.getLevelNamesMapping() else "INFO")
