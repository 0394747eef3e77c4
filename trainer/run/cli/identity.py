"""`python -m trainer identity`: a node's key, made beforehand where others have to be told of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainer.run.cli.train import config_of

__all__ = ["identity_command"]


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
