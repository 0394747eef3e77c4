"""The application: its commands, how it logs, and how errors become exit codes.

Exit codes: 0 done, 1 an error (one line says what), 2 invalid options, or in a swarm files with which a process cannot
begin, 129, 130 and 143 stopped by SIGHUP, SIGINT and SIGTERM with everything saved.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import cast

import typer

from genesis.errors import GenesisError
from loader import LoaderError, LoaderUsageError
from manifests import ContractError
from trainer.errors import TrainerError, TrainerUsageError
from trainer.run.cli import (
    authority,
    commands,
    doctor,
    evaluating,
    monitoring,
    profile,
    reporting,
    run_file,
    seed,
    train,
)

# typer brings its own copy of click since 0.27 and the real one before: this is the base of usage errors in either.
_CLICK_ERROR: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if issubclass(base, Exception) and base.__name__ == "ClickException"
)

_INTERRUPTED = 130

app = typer.Typer(
    name="trainer",
    help="Train a language model on a store's tokens, alone or with others (docs/training.md).",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.callback()(train.train_command)
app.command("worker")(train.worker_command)
app.command("seed")(seed.seed_command)
app.command("identity")(commands.identity_command)
app.command("export")(commands.export_command)
app.command("eval")(evaluating.eval_command)
app.command("rollback")(commands.rollback_command)
app.command("plot")(commands.plot_command)
app.command("report")(reporting.report_command)
app.command("profile")(profile.profile_command)
app.command("doctor")(doctor.doctor_command)
app.command("monitor")(monitoring.monitor_command)
app.command("dashboard")(monitoring.dashboard_command)
app.add_typer(commands.swarm_app, name="swarm")
app.add_typer(run_file.run_app, name="run")
app.add_typer(authority.authority_app, name="authority")


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code."""
    _set_up_output()
    try:
        result = app(args=list(arguments), prog_name="python -m trainer", standalone_mode=False)
    except _CLICK_ERROR as error:
        shown = cast("typer.BadParameter", error)
        shown.show()
        return shown.exit_code
    except train.StoppedBySignal as stopped:
        return stopped.exit_code
    except (KeyboardInterrupt, typer.Abort):
        result = _INTERRUPTED
    except (TrainerUsageError, LoaderUsageError) as error:
        return _fail(str(error), 2)
    except (TrainerError, LoaderError, GenesisError, ContractError) as error:
        return _fail(f"{error}{_advice(arguments)}", 1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"cannot go on: {where}{error.strerror or error}{_advice(arguments)}", 1)
    if result == _INTERRUPTED:  # typer since 0.16 returns it for an interrupt, and raised Abort before.
        return _fail("interrupted; nothing was saved since the last checkpoint", _INTERRUPTED)
    return result if isinstance(result, int) else 0


def _fail(message: str, code: int) -> int:
    logging.getLogger("trainer").debug("failed", exc_info=True)
    typer.echo(f"trainer: {message}", err=True)
    return code


def _advice(arguments: Sequence[str]) -> str:
    """Names the doctor where a node could not start or go on, for another reason than an option that makes no sense.

    Its options are not repeated: they may hold a token.
    """
    first = next(iter(arguments), "")
    if first != "worker" and not first.startswith("-"):
        return ""
    options = "the same options" if first != "worker" else "the same options behind 'worker' (and --stage)"
    return f"; 'python -m trainer doctor' with {options} says what stands in the way"


def _set_up_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    level = os.environ.get("GENESIS_LOG", "INFO").upper()
    logging.basicConfig(
        level=level if level in logging.getLevelNamesMapping() else "INFO",
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    # What libraries log below warnings is not about training.
    libraries = "httpx httpcore uvicorn hivemind asyncio urllib3 botocore filelock matplotlib huggingface_hub"
    for name in libraries.split():
        logging.getLogger(name).setLevel(logging.WARNING)
