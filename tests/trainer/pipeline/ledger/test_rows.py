"""From a store to lanes, and from a micro-batch's name to its rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loader.options import StoreOptions
from loader.session import Session
from loader.stream.assignment import assign
from tests.support.ledger_cast import STAGES
from tests.support.ledger_run import CONFIG, SEQ_LEN, Run, ledger_run, run_of
from tests.support.token_store import TokenStore
from trainer.errors import TrainerUsageError
from trainer.pipeline.ledger import lanes_of, preferred_shards, spec_of
from trainer.pipeline.protocol.work import MicroBatchId


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return ledger_run(tmp_path)


@pytest.mark.parametrize("epoch", [0, 5])
def test_a_micro_batch_is_the_same_rows_for_whoever_reads_it_in_any_order(run: Run, epoch: int) -> None:
    names = [MicroBatchId(epoch, shard, row) for shard in (1, 2, 3) for row in range(0, 19, 4)]
    one = {name: run.rows().read(name) for name in names}
    rows = run.rows()
    rows.want([3, 2, 1])
    for name in reversed(names):
        inputs, labels = rows.read(name)
        assert torch.equal(inputs, one[name][0])
        assert torch.equal(labels, one[name][1])
        assert inputs.dtype == labels.dtype == torch.int64
        assert torch.equal(inputs[:, 1:], labels[:, :-1])
        assert len(inputs) == (3 if name.row == 16 else 4)
    assert not torch.equal(one[names[0]][0], run.rows().read(MicroBatchId(epoch + 1, 1, 0))[0])
    with pytest.raises(TrainerUsageError, match="multiple of 4 below 19"):
        rows.read(MicroBatchId(epoch, 1, 20))


def test_a_shard_the_store_has_gained_is_read_without_a_restart(tmp_path: Path) -> None:
    store = TokenStore.of(tmp_path / "store", 4)
    rows = run_of(store.folder, tmp_path / "cache", tmp_path / "journal").rows()
    store.grow(1)
    inputs = rows.read(MicroBatchId(0, 4, 0))[0]
    assert inputs.shape == (4, SEQ_LEN)
    ids = torch.from_numpy(store.ids(4))
    assert all(any(torch.equal(row, ids[at : at + SEQ_LEN]) for at in range(0, 1900, SEQ_LEN)) for row in inputs)


def test_lanes_are_the_loaders(tmp_path: Path) -> None:
    store = TokenStore.of(tmp_path / "store", 10, sources=("alpha", "beta"))
    catalog = Session.open(StoreOptions.of(store.url, cache_dir=tmp_path / "cache")).catalog
    (both,) = lanes_of(catalog, {}, holdout=1)
    assert (both.spec.source, list(both.shards)) == (None, [2, 3, 4, 5, 6, 7, 8, 9])
    beta, alpha = lanes = lanes_of(catalog, {"beta": 1.0, "alpha": 3.0}, holdout=2)
    assert [(lane.spec.source, lane.spec.weight) for lane in lanes] == [("beta", 1.0), ("alpha", 3.0)]
    assert (list(alpha.shards), list(beta.shards)) == ([4, 6, 8], [5, 7, 9])
    assert preferred_shards("driver-1", [both], 3, "modulo") == tuple(assign("driver-1", both.shards, 3, "modulo"))
    with pytest.raises(TrainerUsageError, match="at most 1999"):
        spec_of(catalog, lanes, stages=STAGES, seed=0, seq_len=2000, micro_batch_rows=1, config=CONFIG)
    with pytest.raises(TrainerUsageError, match="multiple of a micro-batch's 3 rows, found 8"):
        spec_of(catalog, lanes, stages=STAGES, seed=0, seq_len=100, micro_batch_rows=3, config=CONFIG)
