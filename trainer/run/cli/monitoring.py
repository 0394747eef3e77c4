"""`python -m trainer monitor` and `dashboard`: look at a run from outside, and print or serve what they see."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainer.errors import TrainerUsageError
from trainer.run.cli.train import _PATHS, StoppedBySignal

if TYPE_CHECKING:
    from trainer.monitor.run_view import RunView
    from trainer.run.config import RunConfig
    from trainer.run.node.stopping import StopRequest

_CLEAR = "\x1b[2J\x1b[H"

_Peers = Annotated[
    list[str] | None,
    typer.Option("--initial-peers", help="host:port of a node, or /ip4/… of a seed; may be given again."),
]
_Run = Annotated[
    str | None,
    typer.Option("--run", "--config", help="The run's file or its address; without one stages and keeper are hearsay."),
]
_RunId = Annotated[str, typer.Option("--run-id", help="Name of the run, if there is no file; else the file's.")]
_Set = Annotated[list[str] | None, typer.Option("--set", help="Any option of the file.")]
_Host = Annotated[str, typer.Option("--host", help="Address to serve at.")]
_Key = Annotated[Path | None, typer.Option("--key", help="File of its key, made if it is not there.")]
_Token = Annotated[
    str, typer.Option("--token", envvar="GENESIS_READ_TOKEN", help="What readers must know; else whoever may connect.")
]


def monitor_command(
    initial_peers: _Peers = None,
    run: _Run = None,
    run_id: _RunId = "",
    set_: _Set = None,
    db: Annotated[
        Path | None,
        typer.Option(help="File of the history; else RUN.sqlite in ~/.neuroshard/monitor, none with --once."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Serve a page and JSON at this port; 0: any free one.")] = None,
    host: _Host = "127.0.0.1",
    token: _Token = "",
    interval_s: Annotated[float, typer.Option(help="Seconds between two looks.")] = 60.0,
    key: _Key = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a look on standard output.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
) -> None:
    """Watches a run without joining it: progress, stages, nodes, rounds, alarms; keeps the history in sqlite."""
    from trainer.monitor import ApiConfig
    from trainer.run.node.stopping import StopRequest

    api = None if port is None else ApiConfig(host=host, port=port, read_token=token)
    stop = StopRequest()
    _watch(
        _config_of(run, set_ or [], {"initial_peers": initial_peers, "run_id": run_id}),
        {"once": once, "interval_s": interval_s, "path": db, "key": key, "api": api, "has_run_file": run is not None},
        stop,
        _shower(stop.ask, as_json=json, in_full=once),
    )


def dashboard_command(
    initial_peers: _Peers = None,
    run: _Run = None,
    run_id: _RunId = "",
    set_: _Set = None,
    db: Annotated[
        Path | None, typer.Option(help="File of the history; else RUN.sqlite in ~/.neuroshard/monitor, as a monitor's.")
    ] = None,
    port: Annotated[int, typer.Option(help="Serve the page at this port; 0: any free one.")] = 8080,
    host: _Host = "127.0.0.1",
    token: _Token = "",
    interval_s: Annotated[float, typer.Option(help="Seconds between two looks.")] = 10.0,
    key: _Key = None,
) -> None:
    """Shows a run in a browser, live and read only: loss, rounds, nodes, stages, alarms; joins nothing."""
    from trainer.monitor import ApiConfig
    from trainer.run.node.stopping import StopRequest

    api = ApiConfig(host=host, port=port, read_token=token)
    _watch(
        _config_of(run, set_ or [], {"initial_peers": initial_peers, "run_id": run_id}),
        {"interval_s": interval_s, "path": db, "key": key, "api": api, "has_run_file": run is not None},
        StopRequest(),
        lambda view: None,
    )


def _watch(
    found: tuple[RunConfig, bool], given: dict[str, Any], stop: StopRequest, show: Callable[[RunView], None]
) -> None:
    """Looks at the run that a configuration is of, with the options given, until it is stopped."""
    from trainer.run.monitoring.process import MonitorOptions, run_monitor

    config, is_swarm = found
    if not 1.0 <= given["interval_s"] <= 3600.0:
        raise TrainerUsageError(f"--interval-s: expected 1 to 3600, found {given['interval_s']:g}")
    if not config.discovery.initial_peers:
        raise TrainerUsageError(
            "--initial-peers: expected host:port of a node of the run, or the address that a seed prints, found none"
        )
    if given["path"] is None and not given.get("once"):
        given["path"] = Path(config.state_dir).expanduser() / "monitor" / f"{config.run_id}.sqlite"
    run_monitor(config, MonitorOptions(is_swarm=is_swarm, **given), stop, show)
    if stop.signal is not None:
        raise StoppedBySignal(stop.signal)


def _config_of(run: str | None, overrides: list[str], given: dict[str, Any]) -> tuple[RunConfig, bool]:
    """Returns what a run file says, with what was given, and whether it says that the model is cut into stages.

    Nothing is kept on the disk, as the runs are that nodes here belong to.
    """
    from trainer.run.config import merged, nested
    from trainer.run.signed.sources import config_from, options_of

    values, fetched = options_of(run, overrides)
    for name, value in given.items():
        if value:
            values = merged(values, nested(_PATHS[name], value))
    config = config_from(merged({"node_id": "monitor"}, values), run)
    if fetched is None:
        return config, run is not None and "swarm" in values
    if config.run_id != fetched.file.name:
        raise TrainerUsageError(f"--run-id: expected {fetched.file.name}, as the run file says, found {config.run_id}")
    return config, fetched.file.is_of_stages(config)


def _shower(stop: Callable[[], None], *, as_json: bool, in_full: bool) -> Callable[[RunView], None]:
    """What shows a look: JSON, a table that is redrawn on a terminal, a line a look elsewhere."""
    from trainer.monitor.run_text import run_line, run_lines

    is_terminal = sys.stdout.isatty()
    is_coloured = is_terminal and not os.environ.get("NO_COLOR")

    def show(view: RunView) -> None:
        try:
            if as_json:
                typer.echo(view.model_dump_json())
            elif in_full or is_terminal:
                width = shutil.get_terminal_size().columns if is_terminal else 0
                lines = run_lines(view, is_coloured=is_coloured)
                shown = [line if not width or line.startswith("\x1b") else line[:width] for line in lines]
                typer.echo(("" if in_full else _CLEAR) + "\n".join(shown), color=is_coloured or None)
            else:
                typer.echo(f"{view.time} {run_line(view)}")
        except BrokenPipeError:
            # What is still buffered would fail again, at the latest at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            stop()

    return show
