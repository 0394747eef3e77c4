"""`python -m trainer worker`: holds one stage of a pipeline."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from trainer.run.cli.train import StoppedBySignal, config_of

__all__ = ["worker_command"]

_OPTIONS = (
    "node_id",
    "store",
    "run_id",
    "initial_peers",
    "port",
    "public_address",
    "device",
    "threads",
    "log_dir",
    "api_host",
    "api_port",
    "api",
)


def worker_command(
    context: typer.Context,
    stage: Annotated[str, typer.Option(help="head, body-1, …, tail; auto: the one that needs help most.")] = "auto",
    run: Annotated[
        Path | None, typer.Option("--run", "--config", help="The run file (YAML), the same for all of a run.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any option of the file: inner.lr=3e-4.")] = None,
    node_id: Annotated[str | None, typer.Option(help="Name of this worker; else one of its own.")] = None,
    store: Annotated[str | None, typer.Option(help="Store whose vocabulary is trained; else the run file's.")] = None,
    run_id: Annotated[str | None, typer.Option(help="Nodes of one run train one model.")] = None,
    initial_peers: Annotated[
        list[str] | None, typer.Option(help="host:port of a node, or /ip4/… of a seed; may be given again.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port for other nodes; else any free one.")] = None,
    public_address: Annotated[str | None, typer.Option(help="host:port others reach this worker at.")] = None,
    at: Annotated[
        str, typer.Option(help="Begin with the stage's checkpoint of this time; newer ones are set aside.")
    ] = "",
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads on a CPU.")] = None,
    log_dir: Annotated[str | None, typer.Option(help="Folder for JSON lines of steps and rounds.")] = None,
    api_host: Annotated[str | None, typer.Option(help="Address to serve figures at; else 127.0.0.1.")] = None,
    api_port: Annotated[int | None, typer.Option(help="Port to serve figures at; else 8000; 0: any.")] = None,
    api: Annotated[bool | None, typer.Option("--api/--no-api", help="Serve figures over HTTP.")] = None,
) -> None:
    """Holds a stage: computes what drivers send, and stays together with the stage's other workers."""
    del node_id, store, run_id, initial_peers, port, public_address, device, threads, log_dir, api_host, api_port, api
    given: dict[str, Any] = {
        name: context.params[name] for name in _OPTIONS if context.params[name] not in (None, [], ())
    }
    given.setdefault("node_id", f"worker-{secrets.token_hex(4)}")
    config = config_of(run, set_ or [], given)

    from trainer.run.node import StopRequest
    from trainer.run.swarm.worker_start import run_worker

    stop = StopRequest()
    run_worker(config, stage, stop, at=at)
    if stop.signal is not None:
        raise StoppedBySignal(stop.signal)
