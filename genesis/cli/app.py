"""The application: its commands, how it logs, and how errors become exit codes.

Other packages bring commands too: ``loader`` has ``genesis cache``, though genesis may not import it. A package
declares a `typer.Typer` in the entry-point group ``genesis.commands``. The group is looked up (40 ms) only where the
command line names none of genesis' own commands, and only the plug-in that it names is imported; the help needs all of
them. A plug-in that cannot be loaded costs one line on standard error; everything else goes on working.

A plug-in's own errors are its own to tell: its commands print one line and raise ``typer.Exit``.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, cast

import typer

from genesis import __version__
from genesis.cli import doctor, export, import_tokens, inspect, populate, report, serve, sources, status, verify
from genesis.errors import (
    GenesisError,
    InterruptedRunError,
    StoreError,
    StoreFullError,
    StoreRemovedError,
    UnknownSourceError,
    UsageError,
)
from genesis.verbosity import add_verbosity, set_up_logging
from manifests import ContractError

# typer brings its own copy of click since 0.27 and the real one before: this is the base of usage errors in either.
_CLICK_ERROR: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if issubclass(base, Exception) and base.__name__ == "ClickException"
)

_LOGGED = ("genesis", "loader", "manifests")
"""Packages whose logging the command line sets."""

_WRITING = frozenset({"populate", "learn", "import"})
"""Commands that fail on a store for reasons that `genesis doctor` looks for."""

app = typer.Typer(
    name="genesis",
    help="Turn web text into token shards that training nodes can trust.",
    no_args_is_help=True,
    invoke_without_command=True,
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
app.command("learn")(populate.learn_command)
app.command("status")(status.status_command)
app.command("verify")(verify.verify_command)
app.command("serve")(serve.serve_command)
app.command("report")(report.report_command)
app.command("doctor")(doctor.doctor_command)
app.command("keygen")(verify.keygen_command)
app.command("import")(import_tokens.import_command)
app.add_typer(sources.app, name="sources")
app.add_typer(inspect.app, name="inspect")
inspect.export_app.command("shards")(export.shards_command)
app.add_typer(inspect.export_app, name="export")


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code."""
    set_up_logging(_LOGGED)
    add_plugins(app, arguments)
    command = typer.main.get_command(app)
    add_verbosity(command, _LOGGED)
    try:
        result = command.main(args=list(arguments), prog_name="genesis", standalone_mode=False)
    except _CLICK_ERROR as error:
        return _show(cast("typer.BadParameter", error))
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    except (UsageError, UnknownSourceError) as error:
        return _fail(str(error), 2)
    except InterruptedRunError as error:
        return _fail(str(error), 130)
    except (GenesisError, ContractError) as error:
        code = _fail(str(error), 1)
        says_all = isinstance(error, (StoreFullError, StoreRemovedError))
        if isinstance(error, StoreError) and not says_all and _WRITING.intersection(arguments):
            _say("'genesis doctor --store URL', with the same store, says what stands in the way")
        return code
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
    _say(message)
    return code


def _say(message: str) -> None:
    with suppress(OSError):  # Nobody may be there to read it: a closed terminal, a full disk.
        typer.echo(f"genesis: {message}", err=True)


GROUP = "genesis.commands"


def add_plugins(app: typer.Typer, arguments: Sequence[str]) -> None:
    """Adds the plug-ins that a command line needs.

    Args:
        app: the application; one that has a command of a plug-in's name keeps it.
        arguments: the command line, without the name of the program.
    """
    known = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    wanted = next((argument for argument in arguments if not argument.startswith("-")), None)
    if wanted in known:
        return
    found = importlib.metadata.entry_points(group=GROUP)
    named = [plugin for plugin in found if plugin.name == wanted]
    for plugin in named or found:
        if plugin.name not in known:
            _add(app, plugin)


def _add(app: typer.Typer, plugin: importlib.metadata.EntryPoint) -> None:
    try:
        commands = plugin.load()
        if not isinstance(commands, typer.Typer):
            raise TypeError(f"expected a typer.Typer, found {type(commands).__name__}")
    except Exception as error:  # noqa: BLE001  importing other people's code can raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        typer.echo(f"genesis: the command '{plugin.name}' of {plugin.value} is left out: {reason}", err=True)
        return
    app.add_typer(commands, name=plugin.name)
