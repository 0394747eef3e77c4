"""`python -m trainer seed`: a place to begin for nodes that look for each other."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["seed_command"]


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
    seed(config, _ready)


def _ready(addresses: tuple[str, ...]) -> None:
    typer.echo("seed is ready; give nodes one of these:")
    for address in addresses:
        typer.echo(f"  --initial-peers {address}")
