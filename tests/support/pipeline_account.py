"""The account of a pipeline's data, counted again: from the journal, record by record, and from what workers stepped.

    check_account(swarm)    # all processes have ended; no worker was killed

Two things that know nothing of each other have to agree: what drivers settled with the keeper, and how many tokens each
stage's workers say went into their optimizer steps. What is done went into every stage once; what was lost, into some.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from tests.support.pipeline_swarm import STAGES, PipelineSwarm
from trainer.inner import lr_at, make_optimizer
from trainer.model import build_model, limit_ids
from trainer.model.loss import IGNORED_LABEL
from trainer.model.stages import stage_shapes
from trainer.pipeline.ledger import Account, Journal, LedgerSpec, LedgerState, MicroBatches, Run, lanes_of
from trainer.pipeline.ledger.records import Granted, Opened, Record, Resolved, Settled
from trainer.pipeline.protocol.work import MicroBatchId
from trainer.run.config import RunConfig
from trainer.run.node.data import open_session
from trainer.run.swarm.shape import shape_of, target_tokens_of


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


@dataclass(frozen=True)
class SingleStep:
    """An optimizer step of the whole model."""

    loss: float
    num_tokens: int
    grad_norms: Mapping[str, float]
    """Of each stage's part, before clipping."""


def records_of(journal: Path) -> list[Record]:
    """All that was written of an account; nobody must be keeping it."""
    opened, records = Journal.open(journal)
    opened.close()
    return records


def micro_batches_given(records: list[Record]) -> list[MicroBatchId]:
    """In the order drivers were given them, without what came back unbegun."""
    spec = _spec(records)
    given: dict[MicroBatchId, None] = {}
    for record in records:
        if isinstance(record, Granted):
            given |= {each: None for run in record.runs for each in spec.layout.micro_batches(run)}
        elif isinstance(record, Settled):
            for each in (each for run in record.handed_back for each in spec.layout.micro_batches(run)):
                del given[each]
    return list(given)


class OneProcess:
    """Trains the model of a run's configuration.

    Args:
        config: of the run.
        records: of its account.
    """

    def __init__(self, config: RunConfig, records: list[Record]) -> None:
        self._config = config
        shape = shape_of(config)
        self._plan = shape.plan
        spec = _spec(records)
        self.rows = MicroBatches(open_session(config.data), spec.seed, spec.layout)
        self._given = micro_batches_given(records)
        self.model = build_model(self._plan.config, config.seed)
        limit_ids(self.model, shape.num_ids)
        self.optimizer = make_optimizer(self.model, config.inner)

    def steps(self) -> Iterator[SingleStep]:
        target_tokens = target_tokens_of(self._config)
        loss_sum, num_tokens, step = torch.zeros(()), 0, 0
        for micro_batch in self._given:
            inputs, labels = self.rows.read(micro_batch)
            loss, _ = self.model.loss_sum(inputs, labels)
            loss.backward()
            loss_sum += loss.detach()
            num_tokens += int((labels != IGNORED_LABEL).sum())
            if num_tokens >= target_tokens:
                norms = self._stepped(step, num_tokens)
                yield SingleStep(float(loss_sum) / num_tokens, num_tokens, norms)
                loss_sum, num_tokens, step = torch.zeros(()), 0, step + 1

    def _stepped(self, step: int, num_tokens: int) -> dict[str, float]:
        norms = {}
        for stage, parameters in self._by_stage().items():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad /= num_tokens
            norms[stage] = float(get_total_norm([p.grad for p in parameters if p.grad is not None]))
            options = self._config.swarm.stage
            factor = options.tail_clip_factor if stage == "tail" else options.clip_factor
            if math.isfinite(factor):
                clip_grad_norm_(parameters, factor / math.sqrt(self._plan.num_stages))
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(step, self._config.inner)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norms

    def _by_stage(self) -> dict[str, list[nn.Parameter]]:
        named = dict(self.model.named_parameters())
        return {
            stage: [named[name] for name in stage_shapes(self._plan, stage) if name in named]
            for stage in self._plan.names
        }

    def moments(self) -> dict[str, Tensor]:
        return {
            name: self.optimizer.state[parameter]["exp_avg"]
            for name, parameter in self.model.named_parameters()
            if parameter in self.optimizer.state
        }


def _spec(records: list[Record]) -> LedgerSpec:
    first = records[0]
    assert isinstance(first, Opened), "expected a journal that was not compacted"
    return first.spec
