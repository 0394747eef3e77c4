"""`python -m trainer rollback`: a swarm's stages back at an earlier moment."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["rollback_command"]


def rollback_command(
    run: Annotated[Path, typer.Option("--run", help="The swarm's run file.")],
    at: Annotated[str, typer.Option("--at", metavar="TIME", help="Back to when (ISO 8601, UTC).")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any option of the file, as its workers had it.")
    ] = None,
    stage: Annotated[list[str] | None, typer.Option(help="Only this stage: all this machine has; repeatable.")] = None,
    checkpoint_dir: Annotated[str, typer.Option(help="Folder of checkpoints, if it is not the run file's.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
) -> None:
    """Sets aside all stage checkpoints newer than a time, so that workers start from it; stop them first."""
    from trainer.checkpoint.stages import parse_time, roll_back, spell_time, time_us
    from trainer.run.config import RunConfig, from_mapping, read_run

    config = from_mapping(RunConfig, read_run(run, set_ or []))
    directory = checkpoint_dir or config.swarm.checkpoint.directory
    now_us = time_us(time.time())
    done = roll_back(
        directory, config.run_id, parse_time(at, now_us), now_us, stages=tuple(stage or ()), dry_run=dry_run
    )
    for name, file in done.found.files.items():
        typer.echo(f"{name}: {spell_time(file.header.saved_us)}, step {file.header.version}")
    verb = "would be set aside in" if dry_run else "set aside in"
    typer.echo(f"{len(done.moved)} newer files {verb} {done.folder}")
