"""`python -m trainer profile`: trains for a few steps and says where the time goes; only a trace is kept."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trainer.run.cli import train


def profile_command(
    context: typer.Context,
    steps: Annotated[int, typer.Option(help="Steps that are measured, and then as many that are traced.")] = 20,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the trace.")] = Path("profile"),
    node_id: Annotated[str, typer.Option(help="Whose data are read.")] = "profile",
    store: Annotated[str | None, typer.Option(help="Folder, s3://bucket/prefix or http(s)://host/prefix.")] = None,
    config: Annotated[str | None, typer.Option("--config", "--run", help="YAML file with any option.")] = None,
    set_: train._Set = None,
    preset: Annotated[str | None, typer.Option(help="Size of the model; else by memory.")] = None,
    inner_steps: Annotated[int | None, typer.Option(help="Steps between two outer steps.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a row.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows of a micro-batch; 0: by memory.")] = None,
    accumulation: Annotated[int | None, typer.Option(help="Micro-batches of a step.")] = None,
    device: train._Device = None,
    threads: Annotated[int | None, typer.Option(help="Threads on a CPU.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Measures and traces the steps of a node of its own: tokens/s, MFU, shares of time, the costliest operators."""
    given = {**train._given(context), "node_id": node_id}
    resolved = train.config_of(config, set_ or [], given)

    from trainer.run.cli.displays import NoLines
    from trainer.run.node.profiling import profile_table, profile_training

    found = profile_training(resolved, steps, out, NoLines())
    if json:
        operators = [asdict(each) for each in found.operators]
        report = {"num_steps": found.num_steps, "speed": found.speed.model_dump(), "trace": str(found.trace)}
        typer.echo(json_module.dumps({**report, "operators": operators}))
        return
    for line in profile_table(found):
        typer.echo(line)
