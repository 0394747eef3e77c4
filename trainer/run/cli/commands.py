"""The commands of `python -m trainer` that do not train: identity, rollback, plot, export, swarm."""

from __future__ import annotations

import logging
import os
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from trainer.errors import CheckpointError, ExportError, TrainerError, TrainerUsageError
from trainer.run.cli.train import StoppedBySignal, config_of

if TYPE_CHECKING:
    from torch import Tensor

    from manifests import Vocabulary
    from trainer.model import ModelConfig
    from trainer.model.export import ExportType
    from trainer.run.config import RunConfig

logger = logging.getLogger(__name__)

_DTYPES = ("float32", "bfloat16", "float16")
_FORMS = ("hf", "torchtitan")
_CHECKPOINTS = "~/.neuroshard/checkpoints"
swarm_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


def identity_command(
    node_id: Annotated[str, typer.Option(help="Name of the node.")],
    run: Annotated[str | None, typer.Option("--run", "--config", help="Its run file, which may name a state_dir.")] = (
        None
    ),
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any option of the file: state_dir=/data.")] = None,
) -> None:
    """Prints a node's key, and makes it where there is none; a swarm knows the keeper of its account by it."""
    from trainer.run.config.run import keeper_option
    from trainer.run.node.identity import identity_of, identity_path

    config = config_of(run, set_ or [], {"node_id": node_id})
    key = identity_of(config).peer_id
    typer.echo(key)
    typer.echo(
        f"{identity_path(config)}: for it to keep a swarm's account, in the run file: {keeper_option(key)}", err=True
    )


def rollback_command(
    run: Annotated[str, typer.Option("--run", help="The swarm's run file.")],
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
    from trainer.run.signed.sources import config_from, options_of

    config = config_from(options_of(run, set_ or [])[0], run)
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


@dataclass(frozen=True)
class _Source:
    """A model to export."""

    config: ModelConfig
    state: Mapping[str, Tensor]
    data: Mapping[str, Any]  # The run's ``data`` options: where its vocabulary is.
    lineage: str  # The vocabulary's; empty where the checkpoint does not say.
    description: str


def export_command(
    out_dir: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; must be empty or not be there.")],
    to: Annotated[
        str, typer.Option("--to", help="hf: a Hugging Face model folder. torchtitan: a checkpoint it starts from.")
    ] = "hf",
    run: Annotated[str | None, typer.Option("--run", help="A swarm's run file: its stages, put together.")] = None,
    at: Annotated[
        str, typer.Option("--at", metavar="TIME", help="With --run: as of when (ISO 8601, UTC; or now).")
    ] = "",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="With --run: any option of the file, as its workers had it.")
    ] = None,
    node_id: Annotated[str, typer.Option(help="Whose checkpoint; needless where there is only one.")] = "",
    token: Annotated[str, typer.Option(envvar="GENESIS_TOKEN", help="Wallet that names it.")] = "",
    checkpoint_dir: Annotated[str, typer.Option(help="Folder of checkpoints, if it is not the usual one.")] = "",
    checkpoint: Annotated[Path | None, typer.Option(help="A checkpoint file, in place of those.")] = None,
    store: Annotated[
        str, typer.Option(help="Store of the tokenizer; else the run file's, or what the node trained from.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Writes the model of a checkpoint, with its tokenizer, in another project's form."""
    if to not in _FORMS:
        raise TrainerUsageError(f"--to: expected {' or '.join(_FORMS)}, found {to!r}")
    if dtype not in _DTYPES:
        raise TrainerUsageError(f"--dtype: expected one of {', '.join(_DTYPES)}, found {dtype!r}")
    if run is None and at:
        raise TrainerUsageError("--at: expected --run with it, since only a swarm's stages are kept by time")
    if run is None and set_:
        raise TrainerUsageError("--set: expected --run with it, since it changes what a run file says")
    if run is not None and (checkpoint is not None or node_id):
        raise TrainerUsageError("--run: expected neither --checkpoint nor --node-id with it, found one of them")
    if run is not None:
        source = _of_swarm(run, set_ or [], at or "now", checkpoint_dir)
    else:
        source = _of_node(checkpoint, checkpoint_dir or _CHECKPOINTS, token, node_id)

    from trainer.checkpoint.stages import export_torchtitan
    from trainer.model import export_hf

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer.json"
        tokenizer.write_bytes(_vocabulary(source, store).to_json())
        export = export_hf if to == "hf" else export_torchtitan
        num_files = len(export(source.state, source.config, tokenizer, out_dir, dtype=cast("ExportType", dtype)))
    typer.echo(f"{out_dir}: {num_files} files, {source.description}")


def _of_node(checkpoint: Path | None, directory: str, token: str, node_id: str) -> _Source:
    from trainer.checkpoint.files import read_checkpoint
    from trainer.checkpoint.node import CheckpointContents
    from trainer.model import ModelConfig
    from trainer.run.node.replica import parameters_of

    if checkpoint is None and not token and not node_id:
        known = [path for path in Path(directory).expanduser().glob("dynamic_node_*.pt") if ".step-" not in path.name]
        if len(known) != 1:
            raise TrainerUsageError(
                f"expected one node's checkpoint in {directory}, found {len(known)}; name it by --node-id, --token or "
                "--checkpoint"
            )
        checkpoint = known[0]
    if checkpoint is not None and not checkpoint.is_file():
        raise CheckpointError(f"--checkpoint: expected a file, found none at {checkpoint}")
    found = read_checkpoint(checkpoint) if checkpoint is not None else _newest(directory, token, node_id)
    saved = CheckpointContents.from_mapping(found)
    return _Source(
        config=ModelConfig.from_dict(dict(saved.architecture)),
        state=parameters_of(saved.layers),
        data=saved.config.get("data", {}),
        lineage="",
        description=f"step {saved.training_rounds}, loss {saved.current_loss:.4f}",
    )


def _of_swarm(run: str, overrides: list[str], at: str, directory: str) -> _Source:
    from trainer.checkpoint.stages import assemble, format_time_us, newest_set, parse_time, time_us
    from trainer.run.config import to_mapping
    from trainer.run.signed.sources import config_from, options_of

    config = config_from(options_of(run, overrides)[0], run)
    at_us = parse_time(at, time_us(time.time()))
    found = newest_set(directory or config.swarm.checkpoint.directory, config.run_id, at_us)
    whole = assemble(found)
    versions = [file.header.version for file in found.files.values()]
    if max(versions) - min(versions) > config.swarm.stage.max_staleness:
        logger.warning(
            "the stages' newest checkpoints are %d steps and %.0f s apart; stages that far apart were not trained "
            "against each other: copy newer ones here, or name an earlier --at",
            max(versions) - min(versions),
            (found.last_us - found.first_us) / 1e6,
        )
    stages = ", ".join(
        f"{name} {format_time_us(file.header.saved_us)} step {file.header.version}"
        for name, file in found.files.items()
    )
    return _Source(
        config=whole.config,
        state=whole.state,
        data=to_mapping(config.data),
        lineage=whole.shape.vocabulary,
        description=f"of {stages}",
    )


def _newest(directory: str, token: str, node_id: str) -> dict[str, Any]:
    """Reads the newest checkpoint of a wallet, that of the first rank if it trained under torchrun."""
    from trainer.checkpoint.node import former_wallet_id, load_newest, wallet_id

    wallet = wallet_id(token, node_id)
    for name in (wallet, *([former_wallet_id(token)] if token else [])):
        for instance in ("", "rank-0"):
            found = load_newest(directory, name, instance)
            if found is not None:
                return found
    raise CheckpointError(
        f"expected a checkpoint of this node (dynamic_node_{wallet}.pt) in {directory}, found none; check --node-id, "
        "--token and --checkpoint-dir"
    )


def _vocabulary(source: _Source, store: str) -> Vocabulary:
    """Reads the vocabulary the model was trained with: the store's newest, as far as the model has rows."""
    from genesis.errors import GenesisError
    from loader import LoaderError
    from manifests import FIRST_MERGE_ID, VocabularyFile
    from trainer.run.config import DataConfig, from_mapping
    from trainer.run.node.data import lineage_of, open_session

    options = {**source.data, **({"store": store, "mirrors": []} if store else {})}
    try:
        newest = open_session(from_mapping(DataConfig, options, "data.")).newest_catalog().vocabulary()
    except (GenesisError, LoaderError) as error:
        if store:
            raise
        raise ExportError(f"{error} (the tokenizer's store, as the run has it; --store names another)") from error
    if source.lineage and lineage_of(newest) != source.lineage:
        raise ExportError(
            f"expected the vocabulary the model was trained with ({source.lineage[:12]}), found another in the store "
            f"({lineage_of(newest)[:12]}); name its store by --store"
        )
    rows = source.config.vocab_size
    if newest.next_merge_id <= rows:
        return newest
    if not isinstance(newest, VocabularyFile):
        raise ExportError(
            f"expected the vocabulary the model was trained with, of at most {rows} ids, found one made elsewhere of "
            f"{newest.next_merge_id}; name the store it was trained from by --store"
        )
    return VocabularyFile.from_pairs(newest.pairs()[: rows - FIRST_MERGE_ID], newest.sources_contributed)


@swarm_app.callback()
def _swarm() -> None:
    """A model cut into stages that workers hold and drivers feed (docs/swarm.md)."""


@swarm_app.command("up")
def up_command(
    run: Annotated[str, typer.Option(help="File of the run, YAML; or a signed one, also from an address.")],
    workers: Annotated[int, typer.Option(min=1, max=64, help="Of each stage.")] = 1,
    drivers: Annotated[int, typer.Option(min=1, max=64)] = 1,
    whole_nodes: Annotated[
        int | None,
        typer.Option(
            min=0, max=64, help="That hold all stages; else 1 in a run that has such nodes, and none in others."
        ),
    ] = None,
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
    """Starts seeds, workers, drivers and whole nodes on this machine, shows how they stand, and ends all together."""
    from trainer.model.config import stage_names
    from trainer.run.cli.displays import swarm_display
    from trainer.run.config.unused import tell_unused
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
    wholes = int(config.swarm.whole_nodes) if whole_nodes is None else whole_nodes
    if wholes and not config.swarm.whole_nodes:
        raise TrainerUsageError(
            f"--whole-nodes: expected a run with swarm.whole_nodes (run init --whole-nodes, layout mixed), found "
            f"{wholes} for a run without; leave it out"
        )
    tell_unused(config, holds_stage=True)
    shape_of(config)  # Reports at once what no restart of a process could mend, such as a missing store.
    keeper, key = keeper_among(config, driver_names(drivers))
    settings.append(f"swarm.ledger.keeper={key}")
    if not config.threads:  # The workers share this machine's cores.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        settings.append(f"threads={max(1, cores // (workers * config.swarm.num_stages + wholes))}")
    logs = (folder or Path(config.state_dir).expanduser() / "swarm" / config.run_id).absolute()
    swarm = LocalSwarm(
        run=run if "://" in run else Path(run).absolute(),
        stages=stage_names(config.swarm.num_stages),
        num_workers=workers,
        num_drivers=drivers,
        num_whole_nodes=wholes,
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


@swarm_app.command("status")
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
    return 0 if adds_up else 1


def ending_texts(config: RunConfig, run: Path | str, logs: Path, began_at: float, store: str) -> Iterator[str]:
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
