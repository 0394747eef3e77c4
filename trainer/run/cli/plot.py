"""`python -m trainer plot`: loss and throughput of one or many nodes as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["plot_command"]


def plot_command(
    log_dirs: Annotated[list[Path], typer.Argument(metavar="LOGDIR...", help="Folders of --log-dir, or files.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture.")] = Path("training.png"),
    title: Annotated[str, typer.Option(help="Above it.")] = "",
) -> None:
    """Draws loss and throughput curves from the logs of nodes."""
    from trainer.monitor import plot

    typer.echo(plot(log_dirs, out, title=title))
