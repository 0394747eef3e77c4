"""A pipeline as its users start it: workers and drivers as processes of their own, on this machine.

And the account of its data, counted again (`check_account`): what drivers settled with the keeper, by the journal, and
how many tokens each stage's workers say went into their steps, have to agree.
"""

from __future__ import annotations

import json
import math
import time
import urllib.error
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, get_total_norm

from loader import GenesisDataset
from scripts.swarm_bench.disturbing import is_at_work
from tests.support.training_swarm import TERMINATED, WAIT_S, TrainingNode, TrainingSwarm, merged
from trainer.checkpoint.stages import StageSet, assemble, newest_set, parse_time, time_us
from trainer.inner import lr_at, make_optimizer
from trainer.model import Transformer, build_model, limit_ids
from trainer.model.loss import IGNORED_LABEL
from trainer.model.stages import stage_shapes
from trainer.monitor import SwarmAccount, SwarmStages
from trainer.pipeline.ledger import Account, Journal, LedgerSpec, LedgerState, MicroBatches, Run, lanes_of
from trainer.pipeline.ledger.records import Granted, Opened, Record, Resolved, Settled
from trainer.pipeline.protocol.work import MicroBatchId
from trainer.run.config import RunConfig, from_mapping, read_yaml
from trainer.run.node.data import open_session
from trainer.run.swarm.shape import shape_of, target_tokens_of

STAGES = ("head", "body-1", "tail")
DRIVERS = ("driver-1", "driver-2")

SETTINGS: dict[str, Any] = {
    "run_id": "pipeline",
    "strategy": "async_sparta",
    "inner": {"precision": "fp32", "compile": "off", "warmup_steps": 5},
    "data": {"plateau": "off", "holdout": 0},
    "discovery": {"announce_interval_s": 0.5, "announcement_lifetime_s": 8.0, "poll_interval_s": 0.2},
    "swarm": {
        "num_stages": len(STAGES),
        "stage": {"target_tokens": 256, "clip_factor": float("inf"), "tail_clip_factor": float("inf")},
        "worker": {"progress_interval_s": 0.2},
        "driver": {
            "refresh_s": 0.1,
            "request_timeout_s": 20.0,
            "unclear_s": 10.0,
            "ban_s": 1.0,
            "max_ban_s": 8.0,
            "drain_s": 10.0,
        },
        "ledger": {"worker_gone_s": 20.0},
        "checkpoint": {"interval_s": 600.0},
        "join": {"first_peers_s": 1.5, "idle_s": 4.0, "leave_s": 10.0},
    },
}
"""Over those of `TrainingSwarm`: four micro-batches of 2 × 32 tokens a step, and nobody waited for long."""


class PipelineSwarm(TrainingSwarm):
    """The workers and drivers of one run; ``options`` are over `SETTINGS`, by section and name, however deep."""

    def __init__(self, folder: Path, store: Path | None = None, **options: Any) -> None:
        folder.mkdir(exist_ok=True)
        placed = merged(SETTINGS, {"swarm": {"checkpoint": {"directory": str(folder / "stages")}}})
        super().__init__(folder, store, **merged(placed, options))

    @property
    def run_file(self) -> Path:
        return self._config

    @property
    def config(self) -> RunConfig:
        return from_mapping(RunConfig, read_yaml(self.run_file))

    @property
    def journal(self) -> Path:
        """Of the account; its keeper must have ended."""
        return self.folder / "home" / "ledger" / self.config.run_id / "journal.jsonl"

    def begin_driver(self, name: str = "driver-1", *options: str) -> TrainingNode:
        self.begin(name, options=["--pipeline", "swarm", "--json", *options])
        return self[name]

    def begin_worker(self, name: str, stage: str, options: Sequence[str] = ()) -> TrainingNode:
        self.begin(name, options=options, program=("-m", "trainer", "worker", "--stage", stage))
        return self[name]

    def begin_workers(self, *stages: str, suffix: str = "", options: Sequence[str] = ()) -> list[TrainingNode]:
        return [self.begin_worker(stage + suffix, stage, options) for stage in stages]

    def begin_two_of_each(self) -> dict[str, TrainingNode]:
        """Starts two drivers and ``STAGE.1``, ``STAGE.2`` of each stage; the workers, once all are at work."""
        for name in DRIVERS:
            self.begin_driver(name)
        workers = [self.begin_worker(f"{stage}.{number}", stage) for stage in STAGES for number in (1, 2)]
        self.wait(lambda: all(is_at_work(node.output()) for node in workers), "all workers at work", 4 * WAIT_S)
        return {node.name: node for node in workers}

    def stop_in_order(self, *workers: str, drivers: Sequence[str] = ("driver-1",)) -> None:
        """Drivers first, so that they have somebody to finish with; all save, and nobody has a traceback."""
        for names in (*([name] for name in drivers), workers or STAGES):
            assert self.stop(*names) == [TERMINATED] * len(names)
        assert all("Traceback" not in node.output() for node in self.nodes.values())

    def begin_again(self, name: str, *options: str) -> TrainingNode:
        command = self.nodes[name].command
        again = TrainingNode(name, [*command, *options], self.folder)
        self.nodes[name] = again
        again.start()
        return again

    def wait_for_steps(
        self, name: str, count: int, timeout_s: float = WAIT_S, alive: Iterable[TrainingNode] | None = None
    ) -> None:
        self.wait(lambda: len(steps_of(self[name])) >= count, f"{count} steps of {name}", timeout_s, alive)

    def account(self, name: str = "driver-1") -> SwarmAccount | None:
        answer = self._asked(name, "/api/swarm/account")
        return None if answer is None else SwarmAccount.model_validate(answer)

    def stages(self, name: str = "driver-1") -> SwarmStages | None:
        answer = self._asked(name, "/api/swarm/stages")
        return None if answer is None else SwarmStages.model_validate(answer)

    def checkpoints(self) -> StageSet:
        config = self.config
        return newest_set(config.swarm.checkpoint.directory, config.run_id, parse_time("now", 1 << 62))

    def _asked(self, name: str, path: str) -> dict[str, Any] | None:
        try:
            return self[name].api(path)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            return None


def steps_of(driver: TrainingNode) -> list[dict[str, Any]]:
    lines = [line for line in driver.output().splitlines() if line.startswith('{"kind":"step"')]
    return [json.loads(line) for line in lines if line.endswith("}")]


def held_out_rows(swarm: PipelineSwarm, num_rows: int) -> torch.Tensor:
    """[num_rows, seq_len + 1] ids of the shards that the run leaves out (`data.holdout`)."""
    data, length = swarm.config.data, swarm.config.inner.seq_len + 1
    dataset = GenesisDataset(
        data.store, "reader", seq_len=length, batch_size=num_rows, holdout=data.holdout, split="holdout", plateau="off"
    )
    return next(iter(dataset))["input_ids"]


def held_out_loss(swarm: PipelineSwarm, rows: torch.Tensor, at_s: float | None = None) -> float:
    """Mean loss on rows [n, seq_len + 1] of the model that an export of a moment has; of now, if none is named."""
    config = swarm.config
    at_us = time_us(time.time() if at_s is None else at_s)
    whole = assemble(newest_set(config.swarm.checkpoint.directory, config.run_id, at_us))
    model = Transformer(whole.config)
    model.load_state_dict(dict(whole.state))
    model.eval()
    with torch.no_grad():
        losses = [
            functional.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
            for part in rows.split(64)
        ]
    return float(torch.stack(losses).sum()) / rows[:, 1:].numel()


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
    loss: float
    num_tokens: int
    grad_norms: Mapping[str, float]
    """Of each stage's part, before clipping."""


def records_of(journal: Path) -> list[Record]:
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
    """The same run in one process: the whole model, on the micro-batches of the account, in the order they were given.

    Clipping is by stage, as in a swarm: see `trainer.pipeline.stage.StageConfig`.
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
