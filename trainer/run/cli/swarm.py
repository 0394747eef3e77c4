"""`python -m trainer swarm`: runs all of a swarm on this machine, and shows the status of any swarm."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainer.errors import TrainerError, TrainerUsageError
from trainer.run.cli.train import StoppedBySignal, config_of

if TYPE_CHECKING:
    from trainer.run.config import RunConfig

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
_FAILED = 1


@app.callback()
def _swarm() -> None:
    """A model cut into stages that workers hold and drivers feed (docs/swarm.md)."""


@app.command("up")
def up_command(
    run: Annotated[Path, typer.Option(help="YAML file of the run.")],
    workers: Annotated[int, typer.Option(min=1, max=64, help="Of each stage.")] = 1,
    drivers: Annotated[int, typer.Option(min=1, max=64)] = 1,
    seeds: Annotated[int, typer.Option(min=0, max=8, help="DHT seeds; 0: the processes pass on who there is.")] = 0,
    store: Annotated[str, typer.Option(help="Folder or address of the shards; else the run file's.")] = "",
    max_steps: Annotated[int | None, typer.Option(min=0, help="Of the whole run; 0: go on.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="For all it writes; else the run file's places, and state_dir/swarm for logs.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any option of the file, for all processes.")] = None,
    restart: Annotated[bool, typer.Option("--restart/--no-restart", help="Start again what dies.")] = True,
    json: Annotated[bool, typer.Option("--json", help="JSON lines on standard output.")] = False,
) -> int:
    """Starts seeds, workers and drivers on this machine, shows how they stand, and ends all of them together."""
    from trainer.model.config import stage_names
    from trainer.run.cli.displays import swarm_display
    from trainer.run.node.stopping import StopRequest
    from trainer.run.swarm.keeper import keeper_among
    from trainer.run.swarm.running import LocalSwarm, driver_names, run_local
    from trainer.run.swarm.shape import shape_of
    from trainer.run.swarm.tree import RestartPolicy

    settings = list(set_ or [])
    if folder is not None:
        base = folder.absolute()
        settings += [f"state_dir={base / 'state'}", f"log.directory={base / 'events'}"]
        settings += [f"checkpoint.directory={base / 'checkpoints'}"]
        settings += [f"swarm.checkpoint.directory={base / 'checkpoints' / 'swarm'}"]
    config = config_of(run, settings, {"node_id": "swarm-up", **({"store": store} if store else {})})
    shape_of(config)  # Reports at once what no restart of a process could mend, such as a missing store.
    keeper, key = keeper_among(config, driver_names(drivers))
    settings.append(f"swarm.ledger.keeper={key}")
    if not config.threads:  # The workers share this machine's cores.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        settings.append(f"threads={max(1, cores // (workers * config.swarm.num_stages))}")
    logs = (folder or Path(config.state_dir).expanduser() / "swarm" / config.run_id).absolute()
    swarm = LocalSwarm(
        run=run.absolute(),
        stages=stage_names(config.swarm.num_stages),
        num_workers=workers,
        num_drivers=drivers,
        num_seeds=seeds,
        keeper=keeper,
        store=store,
        max_steps=max_steps,
        settings=tuple(settings),
    )
    stop = StopRequest()
    display = swarm_display(as_json=json)
    began_at = time.time()
    with stop.on_signals():
        outcome = run_local(swarm, logs, RestartPolicy(enabled=restart), display, stop)
    if outcome.exit_code == 2:
        raise TrainerUsageError(outcome.reason)
    named_store = store or any(setting.startswith("data.store=") for setting in settings)
    for text in ending_texts(config, run, logs, began_at, config.data.store if named_store else ""):
        display.event(text)
    if outcome.exit_code:
        raise TrainerError(outcome.reason)
    if stop.signal is not None:
        raise StoppedBySignal(stop.signal)
    return 0


@app.command("status")
def status_command(
    api: Annotated[str, typer.Option(help="Address of a driver's API.")] = "http://127.0.0.1:8000",
    json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> int:
    """Prints the stages and the account of the data, as a driver tells them; exit code 1 if it does not add up."""
    from trainer.run.cli.displays import stage_table, status_json, workers_table
    from trainer.run.swarm.running import SwarmSnapshot, ask_account, ask_stages

    stages = ask_stages(api)
    account = ask_account(api)
    if json:
        typer.echo(status_json(stages, account))
    else:
        lines = stage_table(SwarmSnapshot(stages=stages, account=account, tokens_per_s=stages.tokens_per_s))
        typer.echo("\n".join([*lines, "", *workers_table(stages, account)]))
    adds_up = account is None or (account.micro_batches.adds_up and account.tokens.adds_up)
    return 0 if adds_up else _FAILED


def ending_texts(config: RunConfig, run: Path, logs: Path, began_at: float, store: str) -> Iterator[str]:
    """Yields what `up` prints at the end: how far the run is, where its files are, and how to export a model.

    ``store`` is where the shards are, if the run file does not say that, and else empty.
    """
    from trainer.checkpoint.stages.naming import named_files
    from trainer.model.config import stage_names
    from trainer.run.cli.displays import settled_text
    from trainer.run.swarm.keeper import read_last_account
    from trainer.run.swarm.shape import target_tokens_of

    account = read_last_account(config, began_at)
    if account is None:
        yield "in the end: the keeper of the account did not end in order; what was heard of it last is above"
    else:
        yield f"in the end: {settled_text(account, account.trained_tokens // target_tokens_of(config))}"
    folder = Path(config.swarm.checkpoint.directory).expanduser()
    stages = stage_names(config.swarm.num_stages)
    saved = {found.stage for found in named_files(folder, config.run_id)}
    missing = [stage for stage in stages if stage not in saved]
    none_of = f", none of {', '.join(missing)}" if missing else ""
    yield f"checkpoints are in {folder / config.run_id}{none_of}; logs are in {logs}"
    if not missing:
        words = ["python", "-m", "trainer", "export", "--run", str(run), "--at", "now", "--to", "hf"]
        words += ["--checkpoint-dir", str(folder), *(["--store", store] if store else [])]
        yield f"for one model of the stages: {shlex.join(words)} DIR"
