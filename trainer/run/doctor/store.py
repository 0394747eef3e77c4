"""What a run needs of its store: sources and shards to train on, and a vocabulary that fits model and checkpoint."""

from __future__ import annotations

from typing import Final

from genesis.doctor import Finding
from genesis.doctor.findings import problem_of
from genesis.doctor.store import StoreSeen
from loader import LoaderError
from trainer.checkpoint.node import CheckpointContents, checkpoint_path, load_newest, wallet_id
from trainer.errors import CheckpointError, TrainerUsageError
from trainer.model import ModelConfig, rows_for
from trainer.run.config import RunConfig
from trainer.run.node.data import open_dataset

_MOST_READ_BYTES: Final = 4 << 30
"""A larger checkpoint takes longer to read than anybody waits for a check."""


def shards_finding(config: RunConfig, seen: StoreSeen) -> Finding:
    """Whether the store has shards of the sources that the run trains on."""
    manifest = seen.manifest
    missing = sorted(set(config.data.sources) - set(manifest.sources))
    there = ", ".join(f"{name} {totals.shards}" for name, totals in manifest.sources.items()) or "none"
    if missing:
        text = f"expected shards of {', '.join(config.data.sources)}, found {there}"
        return Finding.failed(
            "store", "shards", text, f"give the run's store, or populate {', '.join(missing)} into it"
        )
    if manifest.total_shards <= config.data.holdout * max(1, len(manifest.sources)):
        text = f"expected more than the {config.data.holdout} held-out shards of each source, found {there}"
        return Finding.failed("store", "shards", text, "populate more (genesis populate), or give a smaller --holdout")
    return Finding.ok("store", "shards", f"shards by source: {there}", shards=float(manifest.total_shards))


def model_rows_finding(seen: StoreSeen, config: RunConfig) -> Finding:
    """Whether a model of a fixed number of rows has one for each id."""
    vocabulary = seen.vocabulary
    if vocabulary is None:
        return Finding.skipped("store", "vocabulary-fits", "the vocabulary cannot be had")
    rows = config.swarm.vocab_rows
    needed = rows_for(vocabulary.next_merge_id)
    if rows and rows < vocabulary.next_merge_id:
        text = f"expected swarm.vocab_rows of {needed:,} or more, found {rows:,} for {vocabulary.next_merge_id:,} ids"
        return Finding.failed("store", "vocabulary-fits", text, "give the store that the run was made for (--store)")
    return Finding.ok("store", "vocabulary-fits", f"{vocabulary.next_merge_id:,} ids in {rows or needed:,} rows")


def checkpoint_finding(config: RunConfig) -> Finding:
    """Whether the node's checkpoint, if it has one, is of this run, model and store: it would be resumed."""
    wallet = wallet_id(config.checkpoint.token, config.node_id)
    path = checkpoint_path(config.checkpoint.directory, wallet)
    if not path.exists():
        return Finding.ok("store", "checkpoint", f"none at {path}: training begins anew, or with the others' state")
    if path.stat().st_size > _MOST_READ_BYTES:
        return Finding.skipped("store", "checkpoint", f"{path} is too large to read for a check")
    cure = "give the node's former options, or begin anew with another --checkpoint-dir"
    try:
        found = load_newest(config.checkpoint.directory, wallet)
        if found is None:
            return Finding.ok("store", "checkpoint", f"none at {path}")
        saved = CheckpointContents.from_mapping(found)
        for name in ("run_id", "strategy"):
            if saved.config.get(name) != getattr(config, name):
                text = f"expected a checkpoint of {name} {getattr(config, name)}, found {saved.config.get(name)}"
                return Finding.failed("store", "checkpoint", f"{path}: {text}", cure)
        shape = ModelConfig.from_dict(dict(saved.architecture))
        wrong = config.model.contradicts(shape)
        if wrong:
            text = f"{path} is of another model ({wrong}): it would be put aside, and training begin anew"
            return Finding.warning("store", "checkpoint", text, "leave --preset and the fields of model out to go on")
        dataset = open_dataset(config)
        try:
            dataset.load_state_dict(saved.loader["stream"])
        finally:
            dataset.close()
    except (CheckpointError, LoaderError, TrainerUsageError, KeyError) as error:
        return Finding.failed("store", "checkpoint", f"{path}: {problem_of(error)}", cure)
    return Finding.ok("store", "checkpoint", f"{path}: step {saved.training_rounds:,}, of this run and store")
