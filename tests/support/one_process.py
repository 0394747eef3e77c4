"""The same run in one process: the whole model, on the micro-batches a swarm was given, in that order.

Clipping is by stage, as in a swarm: see `trainer.pipeline.stage.StageConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from trainer.inner import lr_at, make_optimizer
from trainer.model import build_model, limit_ids
from trainer.model.loss import IGNORED_LABEL
from trainer.model.stages import stage_shapes
from trainer.pipeline.ledger import Journal, LedgerSpec, MicroBatches
from trainer.pipeline.ledger.records import Granted, Opened, Record, Settled
from trainer.pipeline.protocol.work import MicroBatchId
from trainer.run.config import RunConfig
from trainer.run.node.data import open_session
from trainer.run.swarm.shape import shape_of, target_tokens_of


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
