"""A vocabulary that grows while a run goes on: taken up at an outer step, old rows bit for bit, nothing lost before."""

from __future__ import annotations

import json
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genesis.populate.options import LearnOptions, PopulateOptions
from genesis.populate.pipeline import populate
from genesis.store import FolderStore
from manifests import SourceSpec
from tests.support.small_store import NUM_SHARDS, TEXT_SHARD_TOKENS, text_store
from tests.support.trainer_command import TrainerCommand, TrainerHere
from tests.support.training_swarm import wait_until
from trainer.checkpoint.files import read_checkpoint
from trainer.checkpoint.node import checkpoint_path, kept_paths, wallet_id
from trainer.model import ModelConfig, build_model, preset
from trainer.outer.diloco import FlatLayout
from trainer.outer.engine.collective import LocalCollective
from trainer.run.config import DataConfig, RunConfig, from_mapping
from trainer.run.node.data import StoreWatch, endless, lineage_of, open_dataset, open_session, within_vocabulary
from trainer.run.node.replica import Replica

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROUNDS = ("--node-id", "a", "--inner-steps", "5", "--plateau", "off", "--set", "checkpoint.keep=20")
ROWS = {"embedding": "weight", "readout": "output.weight"}


def check_grown(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """All of the state before is in the state after; what is new is drawn, or zero."""
    assert (before["architecture"]["vocab_size"], after["architecture"]["vocab_size"]) == (1024, 2048)
    for layer, name in ROWS.items():
        grown = after["layers"][layer][name]
        assert torch.equal(grown[:1024], before["layers"][layer][name])
        assert grown[1024:].std() > 0.001
    for old, new in zip(before["optimizer"]["state"].values(), after["optimizer"]["state"].values(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            same = new[name][: len(old[name])] if old[name].ndim > 1 else new[name]
            assert torch.equal(same, old[name])
            assert not new[name][len(old[name]) :].any()
    (old_state,), (new_state,) = before["diloco"]["fragments"], after["diloco"]["fragments"]
    for name in ("anchor", "momentum", "reference"):
        old, new = (by_name(saved, state[name]) for saved, state in ((before, old_state), (after, new_state)))
        assert old.keys() == new.keys()
        assert all(torch.equal(new[key][: len(values)], values) for key, values in old.items())
    assert after["diloco"]["vocab_rows"] == 2048


def by_name(saved: Mapping[str, Any], vector: Tensor) -> dict[str, Tensor]:
    """What a flat vector holds of each parameter, in the parameter's shape."""
    model = build_model(ModelConfig.from_dict(saved["architecture"]), 0)
    slices = FlatLayout.of(dict(model.named_parameters())).slices()
    return {name: vector[place].view(shape) for name, shape, place in slices}


def test_adopted_after_a_restart(here: TrainerHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped at step 3, the store grows, started again: rows are added behind the outer step, at step 5."""
    store = copy_text_store(tmp_path / "store")
    grown = TrainerCommand(store, tmp_path)
    still = TrainerCommand(text_store(), tmp_path / "still")
    here.other(*grown.line(*ROUNDS, "--max-steps", "3")[3:])
    grow_text_store(store)
    monkeypatch.setenv("GENESIS_CACHE_DIR", str(tmp_path / "cache of another day"))  # The manifest is kept for minutes.
    said = here.other(*grown.line(*ROUNDS, "--max-steps", "5")[3:])
    assert "vocabulary: 2048 rows, before 1024" in said
    here.other(*still.line(*ROUNDS, "--max-steps", "5")[3:])
    check_grown(still.saved("a"), grown.saved("a"))

    told = here.other(*grown.line(*ROUNDS, "--max-steps", "12")[3:])
    assert "going on from step 5" in told
    assert "vocabulary:" not in told
    assert grown.saved("a")["architecture"]["vocab_size"] == 2048


def test_adopted_by_a_running_node_which_then_reads_the_new_shards(tmp_path: Path) -> None:
    """The rows of before are those of a run whose store stayed as it was."""
    store = copy_text_store(tmp_path / "store")
    grown = TrainerCommand(store, tmp_path)
    options = (*ROUNDS, "--set", "data.refresh_s=0.1", "--set", "checkpoint.every_steps=5")
    with grown.running(*options, "--set", "checkpoint.keep=100000") as node:
        node.wait_for("round", 1)
        grow_text_store(store)
        reached = max(event["outer_step"] for event in node.events if event["kind"] == "round")
        node.wait_for("round", reached + 6)
        assert node.stop() == 143
    told = "".join(node.errors)
    assert "vocabulary: 2048 rows, before 1024" in told
    assert f"the store has {NUM_SHARDS + GROWN_SHARDS} shards now" in told
    saves = [read_checkpoint(path) for path in kept_paths(checkpoint_path(grown.checkpoints, wallet_id("", "a")))]
    kept = {saved["training_rounds"]: saved["architecture"]["vocab_size"] for saved in saves}
    step = min(step for step, rows in kept.items() if rows == 2048)
    assert step % 5 == 0
    assert all(rows == 1024 for earlier, rows in kept.items() if earlier < step)
    still = TrainerCommand(text_store(), tmp_path / "still")
    still(*ROUNDS, "--max-steps", str(step))
    [after] = [saved for saved in saves if saved["training_rounds"] == step]
    check_grown(still.saved("a"), after)


def test_ids_without_a_row_are_read_as_unknown_and_not_learned() -> None:
    batch = {"input_ids": torch.tensor([[5, 1023, 1024]]), "labels": torch.tensor([[1023, 1024, 4000]])}
    rows = iter([1024, 4001])  # They are asked for each batch.
    read, whole = within_vocabulary(iter([batch, batch]), lambda: next(rows))
    assert read["input_ids"].tolist() == [[5, 1023, 3]]
    assert read["labels"].tolist() == [[1023, -100, -100]]
    assert whole is batch


def test_a_model_of_fewer_rows_trains_on_a_store_that_is_ahead(tmp_path: Path) -> None:
    """As a joiner does whose run has not adopted the newest vocabulary yet; what it cannot read is not counted."""
    store = copy_text_store(tmp_path / "store")
    grow_text_store(store)
    values = {
        "node_id": "a",
        "data": {"store": str(store), "sources": {"more": 1.0}, "cache_dir": str(tmp_path / "cache")},
        "inner": {"seq_len": 64, "micro_batch_size": 4},
    }
    config = from_mapping(RunConfig, values)
    dataset = open_dataset(config)
    shape, batches, cpu = preset("tiny", 1024), endless(dataset), torch.device("cpu")
    replica = Replica(config, shape, LocalCollective(), cpu, batches, 1024, dataset.report_loss)
    fewer = [replica.inner.step() for _ in range(3)]
    assert not any(result.skipped for result in fewer)
    assert all(0 < result.num_tokens < 256 for result in fewer)
    for agreed in (0, 1025, 2047):  # What one liar's number makes of the least of all.
        replica.grow(agreed, 1)
        assert replica.vocab_rows == replica.model.readout.num_ids == 1024
    replica.grow(2048, 2048)
    assert replica.inner.step().num_tokens == 256
    dataset.close()


def test_a_grown_store_is_seen_and_one_that_is_gone_only_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = copy_text_store(tmp_path / "store")
    watch, other = (
        StoreWatch(open_session(DataConfig(store=str(url), cache_dir=str(tmp_path / "cache"), timeout_s=1.0)), 0.0)
        for url in (store, text_store("other"))
    )
    before = watch.vocabulary
    grow_text_store(store)
    assert watch.rows() == 1024
    wait_until(watch.look, "the growth to be seen", 60)
    assert (watch.rows(), watch.num_ids > 1024) == (2048, True)
    assert lineage_of(watch.vocabulary) == lineage_of(before) != lineage_of(other.vocabulary)
    shutil.rmtree(store)
    wait_until(lambda: watch.look() or "the store cannot be asked for what is new" in caplog.text, "it to be told", 60)
    assert watch.rows() == 2048


GROWN_SHARDS = 2
_MERGES = 300
"""Beyond the first source's: some 1,260 ids in all, where a model for the first alone has 1,024 rows."""


def copy_text_store(folder: Path) -> Path:
    """A copy of the store that tests share, to be changed."""
    return Path(shutil.copytree(text_store(), folder))


def grow_text_store(folder: Path) -> None:
    """Populates the second source: `GROWN_SHARDS` shards, ids that were not there before."""
    lines = folder.parent / "more.jsonl"
    # Source code: other text than the first source's, of which there is enough everywhere.
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-f]*.py"))
    lines.write_text("".join(json.dumps({"text": path.read_text("utf-8")}) + "\n" for path in sources), "utf-8")
    options = PopulateOptions(
        spec=SourceSpec(name="more", merges=_MERGES),
        store_url=FolderStore(folder).url,
        inputs=(str(lines),),
        num_workers=1,
        shard_tokens=TEXT_SHARD_TOKENS,
        max_shards=GROWN_SHARDS,
        learn=LearnOptions(documents=200, merges=_MERGES),
    )
    populate(options, FolderStore(folder))
