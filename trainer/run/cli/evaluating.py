"""`python -m trainer eval`: how good a node's newest checkpoint is, by its held-out shards and by published tasks.

It reads the checkpoint and changes nothing, so it can run beside the node that trains. The held-out figure is that of
the node's log at the same step: the same windows, read in the same way.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainer.errors import CheckpointMismatchError, TrainerUsageError

if TYPE_CHECKING:
    import torch

    from trainer.checkpoint.node import CheckpointContents
    from trainer.evaluation import HeldOutLoss
    from trainer.model import Transformer
    from trainer.run.config import DataConfig

logger = logging.getLogger(__name__)

_CHECKPOINTS = "~/.neuroshard/checkpoints"
_DECISIVE = ("seq_len", "precision", "document_mask")
"""Inner options that decide how a model is measured."""


def eval_command(
    node_id: Annotated[str, typer.Option(help="Whose newest checkpoint.")] = "",
    store: Annotated[str, typer.Option(help="Store of the shards; else the one the node trained from.")] = "",
    tasks: Annotated[
        list[str] | None, typer.Option(help="Of lm-evaluation-harness, such as hellaswag,arc_easy; repeatable.")
    ] = None,
    tasks_dir: Annotated[Path | None, typer.Option(help="Folder of further task definitions (YAML).")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Examples of each task; 0: all.")] = 0,
    holdout: Annotated[int | None, typer.Option(min=0, help="Held-out shards of each source; else the run's.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=0, help="Held-out tokens to measure; 0: all; else as many as the run does.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows that go through the model at once.")] = 8,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    token: Annotated[str, typer.Option(envvar="GENESIS_TOKEN", help="Wallet that names the checkpoint.")] = "",
    checkpoint_dir: Annotated[str, typer.Option(help="Folder of checkpoints.")] = _CHECKPOINTS,
    checkpoint: Annotated[Path | None, typer.Option(help="A checkpoint file, in place of those.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Evaluates a node's newest checkpoint: its loss on held-out shards, and tasks of lm-evaluation-harness."""
    names = [name for each in tasks or [] for name in each.split(",") if name]
    if names:
        from trainer.evaluation.harness import require_harness

        require_harness()  # Before anything takes time.
    if not (node_id or token or checkpoint):
        raise TrainerUsageError("--node-id: expected whose checkpoint to evaluate (or --checkpoint), found none")

    from trainer.checkpoint.files import read_checkpoint
    from trainer.checkpoint.node import CheckpointContents
    from trainer.inner import use_device
    from trainer.run.cli.commands import _newest

    found = read_checkpoint(checkpoint) if checkpoint is not None else _newest(checkpoint_dir, token, node_id)
    saved = CheckpointContents.from_mapping(found)
    data = _data_of(saved, store, holdout)
    where = use_device(device)
    model = _model_of(saved, where)
    measured = _held_out(saved, model, data, tokens, where, batch_size)
    if measured is None and not names:
        raise TrainerUsageError(
            "expected held-out shards to measure, found that the run holds out none (data.holdout 0) and may have "
            "trained on any; --holdout 1 measures the first of each source all the same, --tasks something else"
        )
    scores = _task_scores(saved, data, names, tasks_dir, limit, where, batch_size) if names else {}
    if as_json:
        from trainer.run.cli.displays import held_out_json

        held_out = held_out_json(measured) if measured is not None else None
        node = str(saved.config.get("node_id", node_id))
        typer.echo(json.dumps({"node_id": node, "step": saved.training_rounds, "held_out": held_out, "tasks": scores}))
        return
    _print(saved, measured, scores)


def _data_of(saved: CheckpointContents, store: str, holdout: int | None) -> DataConfig:
    from trainer.run.config import DataConfig, from_mapping

    options = dict(saved.config.get("data", {}))
    options |= {"store": store, "mirrors": []} if store else {}
    options |= {"holdout": holdout} if holdout is not None else {}
    return from_mapping(DataConfig, options, "data.")


def _model_of(saved: CheckpointContents, device: torch.device) -> Transformer:
    from trainer.model import ModelConfig, build_model, limit_ids
    from trainer.run.node.replica import parameters_of

    model = build_model(ModelConfig.from_dict(dict(saved.architecture)), 0, device=device)
    try:
        model.load_state_dict(parameters_of(saved.layers))
    except RuntimeError as error:
        first = str(error).splitlines()[-1].strip()[:200]
        raise CheckpointMismatchError(f"expected the weights of the checkpoint's architecture: {first}") from error
    if saved.num_ids is not None:
        limit_ids(model, saved.num_ids)
    return model


def _held_out(
    saved: CheckpointContents,
    model: Transformer,
    data: DataConfig,
    tokens: int | None,
    device: torch.device,
    batch_size: int,
) -> HeldOutLoss | None:
    from trainer.evaluation import EvalConfig, HeldOut
    from trainer.inner import InnerConfig, autocast_for
    from trainer.model import within_documents
    from trainer.run.config import from_mapping
    from trainer.run.node.data import open_session

    if not data.holdout:
        return None
    kept = saved.config.get("inner", {})
    inner = from_mapping(InnerConfig, {name: kept[name] for name in _DECISIVE if name in kept}, "inner.")
    evaluated = from_mapping(EvalConfig, saved.config.get("eval", {}), "eval.")
    session = open_session(data)
    if inner.document_mask:
        within_documents(model, session.catalog.vocabulary().eos_id)
    held_out = HeldOut.of(
        session,
        holdout=data.holdout,
        seq_len=inner.seq_len,
        num_tokens=evaluated.tokens if tokens is None else tokens,
        sources=tuple(data.sources),
    )
    return held_out.measure(model, device, rows=batch_size, autocast=autocast_for(device, inner.precision))


def _task_scores(
    saved: CheckpointContents,
    data: DataConfig,
    names: list[str],
    tasks_dir: Path | None,
    limit: int,
    device: torch.device,
    batch_size: int,
) -> dict[str, dict[str, float]]:
    from trainer.evaluation.harness import run_tasks
    from trainer.model import ModelConfig, export_hf
    from trainer.run.cli.commands import _Source, _vocabulary
    from trainer.run.config import to_mapping
    from trainer.run.node.replica import parameters_of

    shape = ModelConfig.from_dict(dict(saved.architecture))
    state = parameters_of(saved.layers)
    source = _Source(config=shape, state=state, data=to_mapping(data), lineage="", description="")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer.json"
        tokenizer.write_bytes(_vocabulary(source, "").to_json())
        export_hf(state, shape, tokenizer, Path(folder) / "model")
        return run_tasks(Path(folder) / "model", names, device, tasks_dir=tasks_dir, limit=limit, batch_size=batch_size)


def _print(saved: CheckpointContents, measured: HeldOutLoss | None, scores: Mapping[str, Mapping[str, float]]) -> None:
    from trainer.run.cli.displays import held_out_text

    typer.echo(f"{saved.config.get('node_id', '')}: step {saved.training_rounds}")
    if measured is None:
        typer.echo("held out: nothing (data.holdout 0)")
    else:
        typer.echo(held_out_text(measured))
    for task, metrics in scores.items():
        shown = []
        for name, value in metrics.items():
            if "_stderr" not in name:
                error = metrics.get(f"{name}_stderr")
                shown.append(f"{name} {value:.4f}" + (f" ± {error:.4f}" if error is not None else ""))
        typer.echo(f"{task}: {', '.join(shown)}")
