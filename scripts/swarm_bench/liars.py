"""Workers that lie, and how soon they are found: real workers of a small model in this process, over real sockets.

Three stages, two or three workers each, which average by DiLoCo; some workers of one stage lie from the beginning, or
later, as a name says. Each cell is a run of its own for each seed, beside runs in which all are honest.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from scripts.trainer_bench.crew import progress
from tests.support.lying_replica import LIES, Lie, lie_named
from tests.support.replica_group import MeetingCollective, ReplicaGroup
from tests.support.small_pipeline import Directory, announced, driver_of
from tests.support.stage_worker import FAST, RUN_ID, RunningWorker, WorkerSetup, running_worker
from tests.support.toy_stage import ListedWork
from trainer.model.config import stage_names
from trainer.network.rpc import Endpoint, Identity, Peer, RpcConfig
from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer
from trainer.pipeline.driver import MicroBatchResult
from trainer.pipeline.protocol.work import LeaseTerm, MicroBatch, MicroBatchId, boottime_s

_ROWS, _POSITIONS, _VOCABULARY = 4, 16, 64
_PER_STEP = 4
_SHARES = ((1, 2), (1, 3), (2, 3))
_LAST = 64
"""Micro-batches at the end whose mean loss is compared."""


class _Sequences(ListedWork):
    """Rows in which seven of eight tokens follow from the one before."""

    async def next(self) -> MicroBatch | None:
        """In order."""
        if not self.left:
            return None
        number = self.left.popleft()
        rows = _sequences(number)
        term = LeaseTerm(boottime_s() + 300.0)
        micro_batch = MicroBatch(MicroBatchId(0, 0, number * _ROWS), rows[:, :-1], rows[:, 1:], term)
        self.given.append(micro_batch.key)
        return micro_batch


def _sequences(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    follows = torch.randperm(_VOCABULARY, generator=torch.Generator().manual_seed(0))
    rows = torch.randint(_VOCABULARY, (_ROWS, _POSITIONS + 1), generator=generator)
    is_noise = torch.rand(rows.shape, generator=generator) < 1 / 8
    for position in range(1, rows.shape[1]):
        rows[:, position] = torch.where(is_noise[:, position], rows[:, position], follows[rows[:, position - 1]])
    return rows


@dataclass
class _Found:
    """What came of a run."""

    loss: float
    liars: list[str]
    accused: list[str]
    undecided: tuple[tuple[str, str], ...]
    lies: list[int] = field(default_factory=list)
    """Of each liar, the counted micro-batches it lied about; its last before it was banned, where it was."""
    evaluated: float = 0.0
    """Compared answers for each micro-batch of a stage."""


async def _run(
    replicas: int, liars: int, lie_name: str | None, seed: int, options: argparse.Namespace, **config: Any
) -> _Found:
    """One run."""
    setup = WorkerSetup(
        seed=seed,
        target_tokens=_ROWS * _POSITIONS * _PER_STEP,
        codec=options.liars_codec,
        model={"dim": 32, "ffn_dim": 64, **({"subspace_rank": 8} if "subspace" in options.liars_codec else {})},
        inner={"lr": options.liars_lr},
    )
    directory, lies = Directory(), dict[str, Lie]()
    lying_stage = lie_named(lie_name)[0] if lie_name else ""
    async with AsyncExitStack() as stack:
        for stage in stage_names(setup.num_stages):
            group, peers = ReplicaGroup(replicas), list[Peer]()
            for number in range(replicas):
                running: RunningWorker = await stack.enter_async_context(
                    running_worker(replace(setup, stage=stage), peers=lambda peers=peers: tuple(peers))
                )
                module = running.worker.replica.module
                trainer = DiLoCoTrainer(
                    module, DiLoCoConfig(inner_steps=options.liars_inner_steps), MeetingCollective(group, number)
                )
                running.worker.stepper.strategy = trainer
                said = announced(stage, 32 + number, running.peer)
                if stage == lying_stage and number < liars:
                    lies[said.uid] = lie_named(lie_name or "")[1]
                    lies[said.uid].begin(running.worker)
                peers.append(running.peer)
                directory.found.append(said)
        endpoint = Endpoint(Identity.create(), RUN_ID, RpcConfig(**FAST))
        await endpoint.start()
        stack.push_async_callback(endpoint.stop)
        work = _Sequences(0)
        work.left = deque(range(seed * 1_000_000, seed * 1_000_000 + options.liars_micro_batches))
        losses: list[float] = []
        lies_at: dict[str, int] = {}

        def ended(result: MicroBatchResult) -> None:
            losses.append(result.outcome.loss_sum / max(1, result.outcome.num_tokens))
            for uid in driver.status().audit.liars:
                if uid in lies:
                    lies_at.setdefault(uid, lies[uid].num_lies)

        driver = driver_of(
            endpoint,
            setup,
            directory,
            work,
            config={"max_in_flight": 4, "request_timeout_s": 60.0, "unclear_s": 60.0, **config},
            on_result=ended,
            audit_seed=seed,
        )
        await driver.run()
        audit = driver.status().audit
        return _Found(
            loss=statistics.fmean(losses[-_LAST:]),
            liars=list(lies),
            accused=list(audit.liars),
            undecided=audit.undecided,
            lies=[lies_at.get(uid, -1) for uid in lies],
            evaluated=audit.compared / (len(losses) * setup.num_stages),
        )


def measured(lie: str, liars: int, replicas: int, options: argparse.Namespace) -> dict[str, Any]:
    """A cell: runs of all seeds, with and without audits.

    Args:
        lie: by name.
        liars: so many workers of its stage lie.
        replicas: workers of each stage.
        options: of the command line.
    """
    seeds = range(options.liars_seeds)
    runs = [asyncio.run(_run(replicas, liars, lie, seed, options)) for seed in seeds]
    blind = asyncio.run(_run(replicas, liars, lie, 0, options, audit_every=0))
    found = [number for run in runs for number in run.lies if number >= 0]
    return {
        "lie": lie,
        "share": f"{liars} of {replicas}",
        "found": len(found),
        "liars": sum(len(run.liars) for run in runs),
        "after": statistics.fmean(found) if found else None,
        "after_max": max(found, default=None),
        "named": sum(bool(run.undecided) for run in runs),
        "falsely": sum(uid not in run.liars for run in runs for uid in run.accused),
        "loss": statistics.fmean(run.loss for run in runs),
        "blind_loss": blind.loss,
    }


def bench_liars(arguments: argparse.Namespace) -> dict[str, Any]:
    """All lies that are asked for, by all shares; and honest runs."""
    logging.getLogger("trainer").setLevel(arguments.liars_log)
    torch.set_num_threads(1)
    honest = {}
    for replicas in (2, 3):
        runs = [asyncio.run(_run(replicas, 0, None, seed, arguments)) for seed in range(arguments.liars_seeds)]
        honest[replicas] = {
            "loss": statistics.fmean(run.loss for run in runs),
            "accused": sum(len(run.accused) for run in runs),
            "undecided": sum(len(run.undecided) for run in runs),
            "evaluated": statistics.fmean(run.evaluated for run in runs),
        }
        progress(f"honest, {replicas} workers a stage: {honest[replicas]}")
    rows = []
    for lie in arguments.liars_lies or LIES:
        for liars, replicas in _SHARES:
            rows.append(measured(lie, liars, replicas, arguments))
            progress(str(rows[-1]))
    report = {"seeds": arguments.liars_seeds, "codec": arguments.liars_codec, "honest": honest, "rows": rows}
    print(as_text(report))
    return report


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"liars, {report['seeds']} seeds, codec {report['codec']}; loss of the last {_LAST} micro-batches"]
    for replicas, said in report["honest"].items():
        lines.append(
            f"  all honest, {replicas} a stage: loss {said['loss']:.2f}, {said['accused']} accused, "
            f"{said['undecided']} pairs undecided, {said['evaluated']:.3f} comparisons a micro-batch"
        )
    lines.append(
        f"  {'lie':34} {'liars':>7} {'found':>7} {'after':>7} {'at most':>7} {'falsely':>7} {'pair named':>10} "
        f"{'loss':>6} {'unaudited':>9}"
    )
    for row in report["rows"]:
        after, most = ("–", "–") if row["after"] is None else (f"{row['after']:.1f}", str(row["after_max"]))
        lines.append(
            f"  {row['lie']:34} {row['share']:>7} {row['found']:>3}/{row['liars']:<3} {after:>7} {most:>7} "
            f"{row['falsely']:>7} {row['named']:>10} {row['loss']:>6.2f} {row['blind_loss']:>9.2f}"
        )
    return "\n".join(lines)
