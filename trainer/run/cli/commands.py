"""The smaller commands of `python -m trainer`: seed, identity, rollback, plot."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from trainer.run.cli.train import config_of

__all__ = ["identity_command", "plot_command", "rollback_command", "seed_command"]


def seed_command(
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 4001,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    public_host: Annotated[str, typer.Option(help="Address others reach this machine at, behind a router.")] = "",
    identity: Annotated[str, typer.Option(help="File of its key; with it the address stays the same.")] = (
        "~/.neuroshard/seed.id"
    ),
    initial_peers: Annotated[list[str] | None, typer.Option(help="Addresses of other seeds.")] = None,
) -> None:
    """Runs a bootstrap peer: holds no model, forwards announcements; run two, either may be down."""
    from trainer.network.discovery import SeedConfig, seed

    config = SeedConfig(
        port=port,
        host=host,
        public_host=public_host,
        identity_path=identity,
        initial_peers=tuple(initial_peers or ()),
    )

    def on_ready(addresses: tuple[str, ...]) -> None:
        typer.echo("seed is ready; give nodes one of these:")
        for address in addresses:
            typer.echo(f"  --initial-peers {address}")

    seed(config, on_ready)


def identity_command(
    node_id: Annotated[str, typer.Option(help="Name of the node.")],
    run: Annotated[Path | None, typer.Option("--run", "--config", help="Its run file, which may name a state_dir.")] = (
        None
    ),
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any option of the file: state_dir=/data.")] = None,
) -> None:
    """Prints a node's key, and makes it where there is none; a swarm knows the keeper of its account by it."""
    from trainer.run.node.identity import identity_of, identity_path
    from trainer.run.swarm.keeper import keeper_option

    config = config_of(run, set_ or [], {"node_id": node_id})
    key = identity_of(config).peer_id
    typer.echo(key)
    typer.echo(
        f"{identity_path(config)}: for it to keep a swarm's account, in the run file: {keeper_option(key)}", err=True
    )


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
    from trainer.checkpoint.stages import format_time_us, parse_time, roll_back, time_us
    from trainer.run.config import RunConfig, from_mapping, read_run

    config = from_mapping(RunConfig, read_run(run, set_ or []))
    directory = checkpoint_dir or config.swarm.checkpoint.directory
    now_us = time_us(time.time())
    done = roll_back(
        directory, config.run_id, parse_time(at, now_us), now_us, stages=tuple(stage or ()), dry_run=dry_run
    )
    for name, file in done.found.files.items():
        typer.echo(f"{name}: {format_time_us(file.header.saved_us)}, step {file.header.version}")
    verb = "would be set aside in" if dry_run else "set aside in"
    typer.echo(f"{len(done.moved)} newer files {verb} {done.folder}")


def plot_command(
    log_dirs: Annotated[list[Path], typer.Argument(metavar="LOGDIR...", help="Folders of --log-dir, or files.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture.")] = Path("training.png"),
    title: Annotated[str, typer.Option(help="Above it.")] = "",
) -> None:
    """Draws loss and throughput curves from the logs of nodes."""
    from trainer.monitor import plot

    typer.echo(plot(log_dirs, out, title=title))
