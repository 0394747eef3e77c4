"""`python -m trainer`: trains as one node; `python -m trainer worker`: holds one stage of a pipeline."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainer.errors import TrainerUsageError

if TYPE_CHECKING:
    from trainer.run.config import RunConfig

_SIGNAL_EXIT = 128
_INVITATION_PREFIX = "invite-"
"""Tells invitations from wallets, which `--token` names too (`trainer.run.authority.messages`, not imported here: a
node without an authority needs none of it)."""
_STOPPING = "the step or round under way is finished and saved, then this node ends (Ctrl-C again: at once, unsaved)"
_LOADING = "%s starts: loading torch and the trainer"

logger = logging.getLogger(__name__)

_SAME = (
    *("node_id", "run_id", "engine", "strategy", "parallel", "pipeline", "max_steps", "max_tokens"),
    *("seed", "device", "threads"),
)
_PATHS = {
    **{name: name for name in _SAME},
    "store": "data.store",
    "preset": "model.preset",
    "init_from": "model.init_from",
    "initial_peers": "discovery.initial_peers",
    "port": "rpc.port",
    "rounds": "bucket.url",
    "public_address": "rpc.public_address",
    "relay": "relay.through",
    "routing": "swarm.driver.routing",
    "inner_steps": "diloco.inner_steps",
    "compression": "collective.compression",
    "rule": "rule.rule",
    "lr": "inner.lr",
    "seq_len": "inner.seq_len",
    "batch_size": "inner.micro_batch_size",
    "accumulation": "inner.accumulation_steps",
    "plateau": "data.plateau",
    "holdout": "data.holdout",
    "public_key": "data.public_key",
    "checkpoint_dir": "checkpoint.directory",
    "token": "checkpoint.token",
    "invitation": "admission.token",
    "authority": "admission.urls",
    "log_dir": "log.directory",
    "log_to": "log.to",
    "eval_every": "eval.every_steps",
    "sample_every": "eval.sample_every_steps",
    "api_host": "api.host",
    "api_port": "api.port",
    "api": "api.enabled",
}
"""Where each option of the command line stands in the configuration."""

_Set = Annotated[list[str] | None, typer.Option("--set", help="Any option of the file: inner.lr=3e-4.")]
_RunId = Annotated[str | None, typer.Option(help="Nodes of one run train one model.")]
_InitialPeers = Annotated[
    list[str] | None, typer.Option(help="host:port of a node, or /ip4/… of a seed; may be given again.")
]
_Authority = Annotated[
    list[str] | None,
    typer.Option(help="Address of the run's authority, https://host:port (docs/admission.md); may be given again."),
]
_Relay = Annotated[
    list[str] | None,
    typer.Option(help="host:port of a relay, for a node that others cannot connect to; may be given twice."),
]
_Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1.")]
_LogDir = Annotated[str | None, typer.Option(help="Folder for JSON lines of steps and rounds.")]
_ApiHost = Annotated[str | None, typer.Option(help="Address to serve figures at; else 127.0.0.1.")]
_ApiPort = Annotated[int | None, typer.Option(help="Port to serve figures at; else 8000; 0: any.")]
_Api = Annotated[bool | None, typer.Option("--api/--no-api", help="Serve figures over HTTP.")]


class StoppedBySignal(Exception):  # noqa: N818 - no error: everything was saved
    """The node was stopped by a signal and has saved itself."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.exit_code = _SIGNAL_EXIT + number


def train_command(
    context: typer.Context,
    node_id: Annotated[str | None, typer.Option(help="Name of this node: decides its shards.")] = None,
    store: Annotated[str | None, typer.Option(help="Folder, s3://bucket/prefix or http(s)://host/prefix.")] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            "--run",
            help="YAML file with any option, where the command line wins; or a signed run file: a path, https://, "
            "s3://, peer://HOST:PORT/RUN#OWNER.",
        ),
    ] = None,
    set_: _Set = None,
    preset: Annotated[str | None, typer.Option(help="Size of the model: tiny … 7.5b; else by memory.")] = None,
    init_from: Annotated[
        str | None, typer.Option(help="Hugging Face folder to begin with: Llama, Mistral, Qwen 2 and 3, OLMo 2.")
    ] = None,
    run_id: _RunId = None,
    initial_peers: _InitialPeers = None,
    port: Annotated[int | None, typer.Option(help="Port for other nodes; given, the node can be joined.")] = None,
    public_address: Annotated[str | None, typer.Option(help="host:port others reach this node at.")] = None,
    relay: _Relay = None,
    rounds: Annotated[
        str | None,
        typer.Option(
            help="s3://bucket/prefix, or a folder all nodes share: rounds go through it, with no port and no peers."
        ),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="p2p, or torch (under torchrun).")] = None,
    strategy: Annotated[
        str | None, typer.Option(help="diloco, sparseloco, grad, or ddp with the torch engine.")
    ] = None,
    parallel: Annotated[
        str | None, typer.Option(help="Of a node of many ranks, under torchrun: auto, ddp, fsdp, hsdp.")
    ] = None,
    pipeline: Annotated[
        str | None, typer.Option(help="swarm: drive a pipeline of workers (docs/swarm.md), with no parameters here.")
    ] = None,
    routing: Annotated[
        str | None, typer.Option(help="Of a pipeline: hub, by way of this driver; chain, from worker to worker.")
    ] = None,
    inner_steps: Annotated[int | None, typer.Option(help="Steps between two outer steps.")] = None,
    compression: Annotated[str | None, typer.Option(help="Of pseudo-gradients: fp32, fp16, int8, int4, e3m0.")] = None,
    rule: Annotated[
        str | None, typer.Option(help="mean, median, trimmed_mean, krum, multi_krum, centered_clip.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Greatest learning rate of the inner steps.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a row.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows of a micro-batch; 0: by memory.")] = None,
    accumulation: Annotated[int | None, typer.Option(help="Micro-batches of a step.")] = None,
    max_steps: Annotated[
        int | None,
        typer.Option(
            help="Stop after so many inner steps; 0: go on. Of a pipeline: of the whole run, as the keeper is told."
        ),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Stop after so many tokens; 0: go on.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights and data order; one for all nodes of a run.")] = None,
    device: _Device = None,
    threads: Annotated[int | None, typer.Option(help="Threads on a CPU; fixed, a run repeats bit for bit.")] = None,
    plateau: Annotated[str | None, typer.Option(help="When a shard is left early: absolute, relative, off.")] = None,
    holdout: Annotated[
        int | None, typer.Option(help="First shards of every source not to train on; the loss on them is measured.")
    ] = None,
    eval_every: Annotated[int | None, typer.Option(help="Steps between measurements of it; 0: at rounds only.")] = None,
    sample_every: Annotated[int | None, typer.Option(help="Steps between samples of text in the log.")] = None,
    public_key: Annotated[str | None, typer.Option(help="Key that must have signed the store's manifest.")] = None,
    checkpoint_dir: Annotated[str | None, typer.Option(help="Folder for checkpoints.")] = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="GENESIS_TOKEN",
            help="Invitation of the run's authority (invite-…); any other: wallet that names the checkpoint.",
        ),
    ] = None,
    authority: _Authority = None,
    log_dir: _LogDir = None,
    log_to: Annotated[
        list[str] | None, typer.Option(help="Curves in tensorboard, wandb, trackio; may be given again.")
    ] = None,
    api_host: _ApiHost = None,
    api_port: _ApiPort = None,
    api: _Api = None,
    json: Annotated[bool, typer.Option("--json", help="Steps and rounds as JSON lines on standard output.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Trains as one node: alone, or with --initial-peers or --rounds together with whoever else is there."""
    if version:
        from genesis import __version__

        typer.echo(f"trainer {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is not None:
        return
    _train(config_of(config, set_ or [], _given(context)), as_json=json)


def worker_command(
    context: typer.Context,
    stage: Annotated[str, typer.Option(help="head, body-1, …, tail; auto: the one that needs help most.")] = "auto",
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            "--config",
            help="The run file, the same for all of a run; a signed one also from https://, s3://, "
            "peer://HOST:PORT/RUN#OWNER.",
        ),
    ] = None,
    set_: _Set = None,
    node_id: Annotated[str | None, typer.Option(help="Name of this worker; else one of its own.")] = None,
    store: Annotated[str | None, typer.Option(help="Store whose vocabulary is trained; else the run file's.")] = None,
    run_id: _RunId = None,
    initial_peers: _InitialPeers = None,
    port: Annotated[int | None, typer.Option(help="Port for other nodes; else any free one.")] = None,
    public_address: Annotated[str | None, typer.Option(help="host:port others reach this worker at.")] = None,
    relay: _Relay = None,
    token: Annotated[
        str | None, typer.Option(envvar="GENESIS_INVITATION", help="Invitation of the run's authority (invite-…).")
    ] = None,
    authority: _Authority = None,
    at: Annotated[
        str, typer.Option(help="Begin with the stage's checkpoint of this time; newer ones are set aside.")
    ] = "",
    device: _Device = None,
    threads: Annotated[int | None, typer.Option(help="Threads on a CPU.")] = None,
    log_dir: _LogDir = None,
    api_host: _ApiHost = None,
    api_port: _ApiPort = None,
    api: _Api = None,
) -> None:
    """Holds a stage: computes what drivers send, and stays together with the stage's other workers."""
    given = {"node_id": f"worker-{secrets.token_hex(4)}"} | _given(context)
    if "token" in given:  # A worker has no wallet.
        given["invitation"] = given.pop("token")
    config = config_of(run, set_ or [], given)

    from trainer.run.config.unused import tell_unused
    from trainer.run.node.ports import require_free_ports
    from trainer.run.node.stopping import StopRequest

    require_free_ports(config)
    tell_unused(config, holds_stage=True)
    logger.info(_LOADING, config.node_id)
    from trainer.run.swarm.worker_process import run_worker

    stop = StopRequest("the stage is handed over and saved, then this worker ends")
    run_worker(config, stage, stop, at=at)
    if stop.signal is not None:
        raise StoppedBySignal(stop.signal)


def _given(context: typer.Context) -> dict[str, Any]:
    given = {name: value for name, value in context.params.items() if name in _PATHS and value not in (None, [], ())}
    if str(given.get("token", "")).startswith(_INVITATION_PREFIX):
        given["invitation"] = given.pop("token")
    return given


def path_of(name: str, values: Mapping[str, Any]) -> str:
    """Returns where an option of the command line stands in the configuration, beside what is set already."""
    if name == "inner_steps" and values.get("strategy") == "sparseloco":
        return "sparseloco.inner_steps"
    return _PATHS[name]


def with_given(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options with those of the command line over them, in whatever order they were given there."""
    from trainer.run.config import merged, nested

    found = dict(values)
    for name in sorted(given, key=lambda name: name != "strategy"):  # It decides where others stand.
        found = merged(found, nested(path_of(name, found), given[name]))
    return found


def config_of(file: str | Path | None, overrides: list[str], given: dict[str, Any]) -> RunConfig:
    """Builds the configuration: ``given`` options win over ``--set``, that over the file, and that over defaults.

    Nothing wins over what a signed run file says of the run: what contradicts it is a `TrainerUsageError`. Such a run's
    file and changes are kept on the disk, where the node finds them (`trainer.run.signed.SignedRun`).
    """
    from trainer.run.signed.sources import check_agrees, config_from, options_of

    if given.get("rounds") == "":  # As of a shell variable that is not set: it would train alone.
        raise TrainerUsageError("--rounds: expected s3://bucket/prefix or a folder, found an empty address")
    values, fetched = options_of(file, overrides)
    values = with_given(values, given)
    config = config_from(values, file)
    if not config.node_id:
        raise TrainerUsageError("--node-id: expected a name for this node, found none")
    if fetched is not None:
        from trainer.run.signed.run import keep_run

        check_agrees(config, fetched)
        keep_run(fetched.file, fetched.changes, config, fetched.where)
    return config


def _train(config: RunConfig, *, as_json: bool) -> None:
    from trainer.run.cli.displays import training_display
    from trainer.run.config.unused import tell_unused
    from trainer.run.node.ports import require_free_ports, require_rounds_folder
    from trainer.run.node.stopping import StopRequest

    stop = StopRequest(_STOPPING)
    # What the other ranks under torchrun have to log, the first one logs too.
    under_torchrun = config.engine == "torch" or "TORCHELASTIC_RUN_ID" in os.environ
    is_first = config.pipeline == "swarm" or not under_torchrun or os.environ.get("RANK", "0") == "0"
    if not is_first:
        logging.getLogger().setLevel(max(logging.WARNING, logging.getLogger().level))
    if not under_torchrun:  # There each rank has ports of its own.
        require_free_ports(config)
    require_rounds_folder(config)
    tell_unused(config)
    logger.info(_LOADING, config.node_id)
    with training_display(config, stop, as_json=as_json, is_first=is_first) as display:
        if config.pipeline == "swarm":
            from trainer.run.swarm.driver_node import run_driver

            run_driver(config, stop, display)
        elif config.swarm.whole_nodes:
            from trainer.run.swarm.whole_node import run_whole_node

            run_whole_node(config, stop, display)
        else:
            from trainer.run.node.starting import run_node

            run_node(config, display, stop)
    if stop.signal is not None:
        raise StoppedBySignal(stop.signal)
