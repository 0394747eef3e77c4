"""What the ranks of a process group do in the tests of the torch engine; results are plain values and tensors."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.model_configs import batches, small_model
from tests.support.replica_group import Regression
from trainer.aggregation import RuleConfig
from trainer.compression.vectors import codec_named
from trainer.errors import PeerUnavailableError, RoundFailedError
from trainer.inner import InnerConfig, InnerLoop, make_optimizer
from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer
from trainer.outer.engine.collective import Contribution, RoundResult
from trainer.outer.engine.ddp import EveryStepStrategy, ddp_model
from trainer.outer.engine.torch_collective import TorchCollective

NUM_VALUES = 5000
LIAR = 1
MEAN = RuleConfig(rule="mean", validation="log")

# name: (codec, rule, values, what is odd about it)
ROUNDS: dict[str, tuple[str, RuleConfig, int, str]] = {
    "mean": ("fp32", MEAN, NUM_VALUES, ""),
    "tiny": ("fp32", MEAN, 3, ""),
    "weighted": ("fp32", MEAN, NUM_VALUES, "batches"),
    "fp16": ("fp16", MEAN, NUM_VALUES, ""),
    "int8": ("int8", MEAN, NUM_VALUES, "residual"),
    "nan": ("fp32", MEAN, NUM_VALUES, "nan"),
    "idle": ("fp32", MEAN, NUM_VALUES, "idle"),
    "lied to, mean": ("fp32", MEAN, NUM_VALUES, "lie"),
    "lied to, by default": ("fp32", RuleConfig(), NUM_VALUES, "lie"),
    "lied to, median": ("int8", RuleConfig(rule="median", validation="log"), NUM_VALUES, "lie"),
    "lied to, centered_clip": ("fp32", RuleConfig(rule="centered_clip", validation="log"), NUM_VALUES, "lie"),
    "lied to, enforce": ("fp16", RuleConfig(rule="mean"), NUM_VALUES, "lie"),
}


def contribution_of(rank: int, num_values: int = NUM_VALUES, odd: str = "") -> Contribution:
    """What a rank brings: a common direction and noise of its own."""
    common = torch.randn(num_values, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(num_values, generator=torch.Generator().manual_seed(10 + rank))
    vector, num_batches, residual = common + 0.3 * noise, 20, None
    if odd == "lie" and rank == LIAR:
        vector = -10 * vector
    if odd == "nan" and rank == LIAR:
        vector[17] = torch.nan
    if odd == "idle" and rank == LIAR:
        vector, num_batches = torch.zeros(num_values), 0
    if odd == "batches":
        num_batches = [4, 9, 16, 10**12][rank]
    if odd == "residual":
        residual = 0.01 * noise
    return Contribution(
        round_index=3,
        vector=vector,
        num_batches=num_batches,
        age_s=0.0,
        reference=common,
        state_digest="same",
        residual=residual,
    )


def all_rounds(rank: int, num_ranks: int) -> dict:
    """Every round of ROUNDS in one group, and some that fail in between."""
    results: dict[str, dict] = {}
    for name, (codec, rule, num_values, odd) in ROUNDS.items():
        collective = TorchCollective(codec_named(codec), rule)
        results[name] = _flat(collective.reduce(contribution_of(rank, num_values, odd)))
    collective = TorchCollective(codec_named("fp32"), MEAN)
    usual = contribution_of(rank)
    apart = {
        "round": replace(usual, round_index=3 + (rank == 2)),
        "state": replace(usual, state_digest=f"digest {rank}"),
        "nothing": replace(usual, vector=torch.full((NUM_VALUES,), torch.nan)),
        "length": replace(usual, vector=usual.vector[rank:], reference=usual.reference[rank:]),
    }
    refused = results["refused"] = {}
    for name, contribution in apart.items():
        try:
            result = collective.reduce(contribution)
            refused[name] = "zeros" if not result.vector.any() else "a result"
        except RoundFailedError as error:
            refused[name] = str(error)
    refused["afterwards"] = str(len(collective.reduce(usual).report.members))
    return results


def _flat(result: RoundResult) -> dict:
    report = result.report
    return {
        "vector": result.vector,
        "residual": result.residual,
        "members": list(report.members),
        "dropped": [list(pair) for pair in report.dropped],
        "completeness": report.completeness,
        "bytes": [report.sent_bytes, report.received_bytes],
        "rule": report.rule,
        "weights": list(report.weights),
        "validation": [list(pair) for pair in report.validation],
        "seconds": report.seconds,
    }


def diloco(rank: int, num_ranks: int) -> dict:
    """Two ranks on data of their own: whole, and streamed in fragments in the background."""
    results = {}
    for name, config in DILOCO.items():
        model = Regression(rank)
        trainer = DiLoCoTrainer(model, config, TorchCollective(codec_named("int8"), MEAN))
        digests, start = [trainer.state_digest()], held_out_loss(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(200):
            optimizer.zero_grad()
            model(step).backward()
            optimizer.step()
            if trainer.after_inner_step() is not None:
                digests.append(trainer.state_digest())
        trainer.drain()
        results[name] = {
            "digests": digests,
            "parameters": _parameters(model),
            "residual": trainer.state_dict()["fragments"][0]["residual"],
            "losses": [start, held_out_loss(model)],
        }
    return results


DILOCO = {
    "whole": DiLoCoConfig(inner_steps=20),
    "streamed": DiLoCoConfig(inner_steps=20, num_fragments=2, overlap_steps=3),
}


def held_out_loss(model: Regression) -> float:
    return model.loss_on(torch.randn(512, 4, generator=torch.Generator().manual_seed(77))).item()


def every_step(rank: int, num_ranks: int) -> dict:
    """The baseline: DDP, and an outer strategy with nothing to do."""
    model = Regression(rank)
    if rank == 1:
        with torch.no_grad():
            model.net[0].weight.add_(1.0)
    wrapped = ddp_model(model)
    strategy = EveryStepStrategy()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    for step in range(5):
        optimizer.zero_grad()
        wrapped(step).backward()
        optimizer.step()
        assert strategy.after_inner_step() is None
    return {"parameters": _parameters(model), "state": strategy.state_dict()}


def _parameters(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def one_dies(rank: int, num_ranks: int) -> dict:
    """Rank 1 is gone between two rounds; the others say how they took it."""
    model = Regression(rank)
    collective = TorchCollective(codec_named("fp32"), MEAN)
    trainer = DiLoCoTrainer(model, DiLoCoConfig(inner_steps=1), collective)
    trainer.after_inner_step()
    before = trainer.state_digest()
    if rank == 1:
        os._exit(9)
    try:
        trainer.after_inner_step()
        error = "none"
    except PeerUnavailableError as raised:
        error = str(raised)
    return {"error": error, "unchanged": trainer.state_digest() == before, "rounds": trainer.round_index}


CONFIG = InnerConfig(lr=1e-2, warmup_steps=0, max_grad_norm=2.0, accumulation_steps=2)
INFINITE, EMPTY, BAD_GRADIENT = "infinite loss", "no label", "bad gradient"
STEPS: list[tuple[str, str]] = [
    ("", ""),
    ("", INFINITE),
    ("", EMPTY),
    (EMPTY, EMPTY),
    (BAD_GRADIENT, ""),
    (EMPTY, INFINITE),
    ("", ""),
]
"""What is odd about a step, at rank 0 and at rank 1."""
SKIPPED = [False, True, False, True, True, True, False]


class Odd(nn.Module):
    """A model whose loss alone is not finite where the first id is -1 or -3, and its gradient alone where it is -2."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_model()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids.clamp(min=0), labels)
        if input_ids[0, 0] == -1:
            return loss + math.inf
        if input_ids[0, 0] == -3:
            return loss * math.nan
        if input_ids[0, 0] == -2:  # The root of nothing: value 0, slope infinite.
            return loss + (self.model.embedding.weight[0, 0] * 0.0).abs().sqrt()
        return loss


def _batches(rank: int) -> Iterator[dict[str, Tensor]]:
    plain = batches(5 + rank)
    for odd in (each[rank] for each in STEPS):
        for batch in (next(plain) for _ in range(CONFIG.accumulation_steps)):
            if odd == EMPTY:
                batch["labels"] = torch.full_like(batch["labels"], -100)
            elif odd:
                batch["input_ids"][0, 0] = {INFINITE: -1, BAD_GRADIENT: -2}[odd]
            yield batch


def odd_steps(rank: int, num_ranks: int) -> dict[str, object]:
    """All of STEPS; after each, whether it was skipped, and the parameters."""
    model = Odd()
    optimizer = make_optimizer(model, CONFIG)
    loop = InnerLoop(ddp_model(model), optimizer, CONFIG, _batches(rank), torch.device("cpu"))
    skipped, parameters = [], []
    for _ in STEPS:
        skipped.append(loop.step().skipped)
        parameters.append(_parameters(model))
    return {"skipped": skipped, "parameters": parameters}


RUN_S = 90.0
GROUP_TIMEOUT_S = 30.0

Scenario = Callable[[int, int], object]


def run_ranks(scenario: Scenario, num_ranks: int, directory: Path, *, may_die: frozenset[int] = frozenset()) -> list:
    """What a function (at module level) returned in each rank of a gloo group; None where one died that may.

    Its processes are all gone when the call returns, whatever happened.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])  # what optimizers import late
    processes = [
        context.Process(target=_rank_main, args=(scenario, rank, num_ranks, str(directory)), daemon=True)
        for rank in range(num_ranks)
    ]
    deadline_s = time.monotonic() + RUN_S
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            if process.pid is not None:
                process.join(10)
    assert all(code == 0 or rank in may_die for rank, code in enumerate(codes)), f"exit codes {codes}"
    results = [directory / f"rank-{rank}.pt" for rank in range(num_ranks)]
    return [torch.load(path, weights_only=True) if path.exists() else None for path in results]


def _rank_main(scenario: Scenario, rank: int, num_ranks: int, directory: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(directory) / "store"), num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    result = scenario(rank, num_ranks)
    torch.save(result, Path(directory) / f"rank-{rank}.pt")
    dist.destroy_process_group()
    sys.stderr.flush()
