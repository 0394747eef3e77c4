"""The account of a pipeline's data, counted again: from the journal, record by record, and from what workers stepped.

    check_account(swarm)    # all processes have ended; no worker was killed

Two things that know nothing of each other have to agree: what drivers settled with the keeper, and how many tokens each
stage's workers say went into their optimizer steps. What is done went into every stage once; what was lost, into some.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.support.one_process import records_of
from tests.support.pipeline_swarm import STAGES, PipelineSwarm
from trainer.pipeline.ledger import Account, LedgerSpec, LedgerState, Run, lanes_of
from trainer.pipeline.ledger.records import Granted, Opened, Record, Resolved, Settled
from trainer.pipeline.protocol.work import MicroBatchId
from trainer.run.node.data import open_session


@dataclass
class Recount:
    """Micro-batches by what became of them, each in one of these."""

    spec: LedgerSpec
    open: set[MicroBatchId] = field(default_factory=set)
    done: set[MicroBatchId] = field(default_factory=set)
    lost: set[MicroBatchId] = field(default_factory=set)

    def num_tokens(self, micro_batches: Iterable[MicroBatchId]) -> int:
        layout = self.spec.layout
        return sum(layout.rows_of(each) for each in micro_batches) * layout.seq_len

    def take(self, record: Record) -> None:
        match record:
            case Granted():
                granted = self._of(record.runs)
                assert not granted & (self.done | self.lost), "given again though it was settled"
                self.open |= granted
            case Settled():
                for settlement in record.settlements:
                    self._end({MicroBatchId.parse(settlement.micro_batch)}, settlement.outcome)
            case Resolved():
                self._end(self._of(record.done), "done")
                for each in record.lost:
                    self._end(self._of(each.runs), "lost")
            case _:
                pass

    def _end(self, micro_batches: set[MicroBatchId], outcome: str) -> None:
        assert micro_batches <= self.open, f"settled as {outcome}, but not open: {micro_batches - self.open}"
        self.open -= micro_batches
        (self.done if outcome == "done" else self.lost).update(micro_batches)

    def _of(self, runs: Iterable[Run]) -> set[MicroBatchId]:
        return {each for run in runs for each in self.spec.layout.micro_batches(run)}


def account_at_rest(swarm: PipelineSwarm) -> tuple[Account, Recount]:
    """As the keeper would tell it if it were started now: it adds up, to what its journal, not compacted, has in it."""
    records = records_of(swarm.journal)
    assert isinstance(records[0], Opened)
    recount = Recount(records[0].spec)
    for record in records:
        recount.take(record)
    data = swarm.config.data
    lanes = lanes_of(open_session(data).catalog, data.sources, data.holdout)
    account = LedgerState.of(records, recount.spec, [lane.shards for lane in lanes]).account()
    counted = account.micro_batches
    assert counted.leased == counted.done + counted.lost + counted.open
    assert (counted.done, counted.lost, counted.open) == (len(recount.done), len(recount.lost), len(recount.open))
    assert account.tokens.done == recount.num_tokens(recount.done)
    assert sum(it.micro_batches for it in account.lost) == counted.lost
    assert not account.leases, "expected that all leases were given back or looked into"
    assert account.waiting == counted.open, "expected nothing to be open but what was handed back unbegun"
    return account, recount


def check_account(swarm: PipelineSwarm) -> Account:
    """The account adds up, to what the workers of each stage have trained on, over all their lives; none was killed."""
    account, _ = account_at_rest(swarm)
    done, lost = account.tokens.done, account.tokens.lost
    for stage in STAGES:
        workers = [node for name, node in swarm.nodes.items() if name.startswith(stage)]
        applied = sum(int(event.number("num_tokens")) for node in workers for event in node.events("step"))
        assert done <= applied <= done + lost, f"{stage}: {applied} tokens stepped, {done} done, {lost} lost"
    return account
