"""`python -m trainer doctor`: what stands in the way of this node's training. It takes the options of a start."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from trainer.errors import RunFileError, TrainerUsageError
from trainer.run.cli.train import _PATHS, _given, train_command

if TYPE_CHECKING:
    from genesis.doctor import DoctorReport
    from trainer.run.doctor.subject import Subject

_ELSEWHERE = ("version", "json")
_OF_WORKERS = {
    "stage": (str, typer.Option(help="Of a worker: head, body-1, …, tail, or auto.")),
    "at": (str, typer.Option(help="Of a worker; changes no check.")),
}


def _with_options_of_a_start(function: Any) -> Any:
    """Gives a command the options of a node's start, so that a failed start's can be given as they are."""
    start = inspect.signature(train_command)
    hints = get_type_hints(train_command, include_extras=True)
    parameters = [
        each.replace(annotation=hints[name]) for name, each in start.parameters.items() if name not in _ELSEWHERE
    ]
    extra = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default="", annotation=Annotated[kind, option])
        for name, (kind, option) in _OF_WORKERS.items()
    ]
    json = Annotated[bool, typer.Option("--json", help="Print one JSON object (docs/doctor.md) instead of lines.")]
    extra.append(inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=json))
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]

    @functools.wraps(function)
    def command(**values: Any) -> Any:
        return function(**values)

    command.__signature__ = inspect.Signature([*parameters, *extra])  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in [*parameters, *extra]}
    return command


@_with_options_of_a_start
def doctor_command(context: typer.Context, config: str | None, json: bool, stage: str, **values: Any) -> int:
    """Says what stands in the way of training with these options, one line a check, and what to do."""
    from genesis.doctor import Checkup, line_printer
    from genesis.doctor.findings import quieten, summary
    from genesis.doctor.machine import python_finding
    from trainer.run.doctor.membership import run_file_failure
    from trainer.run.doctor.process import ERRORS, examine

    quieten(("genesis", "loader", "trainer", ""))
    checkup = Checkup((lambda _: None) if json else line_printer(), ERRORS)
    try:
        subject = _subject(context, config, values.get("set_") or [], stage)
    except (RunFileError, _ContradictionError) as error:
        checkup.add(python_finding())
        checkup.add(run_file_failure(error))
    else:
        examine(subject, checkup, has_run_option=config is not None)
    report: DoctorReport = checkup.report()
    typer.echo(report.model_dump_json(indent=2) if json else summary(report))
    return 0 if report.ok else 1


class _ContradictionError(TrainerUsageError):
    """An option says otherwise than the run's file."""


def _subject(context: typer.Context, source: str | None, overrides: list[str], stage: str) -> Subject:
    """Reads the options as a start does; raises `RunFileError`, or `TrainerUsageError` for options that make no sense.

    The run's file is kept where the node will look for it, as at a start.
    """
    from trainer.run.config import merged, nested
    from trainer.run.config.run import SwarmConfig
    from trainer.run.doctor.subject import Subject
    from trainer.run.signed.run import keep_run
    from trainer.run.signed.sources import check_agrees, config_from, options_of

    values, fetched = options_of(source, overrides)
    given = _given(context)
    if stage and "token" in given:  # A worker has no wallet.
        given["invitation"] = given.pop("token")
    for name, value in given.items():
        values = merged(values, nested(_PATHS[name], value))
    is_named = bool(values.get("node_id"))
    config = config_from(merged({"node_id": "doctor"}, values), source)
    if fetched is not None:
        try:
            check_agrees(config, fetched)
        except TrainerUsageError as error:
            raise _ContradictionError(str(error)) from error
        keep_run(fetched.file, fetched.changes, config, fetched.where)
    is_swarm = config.swarm != SwarmConfig() or config.strategy == "async_sparta" or ("swarm" in values and not fetched)
    if config.pipeline == "swarm":
        return Subject(config=config, role="driver", fetched=fetched, is_named=is_named)
    if stage or is_swarm:
        return Subject(config=config, role="worker", stage=stage or "auto", fetched=fetched, is_named=is_named)
    return Subject(config=config, role="node", fetched=fetched, is_named=is_named)
