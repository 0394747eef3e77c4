"""The baseline inside clusters: all-reduce, and DistributedDataParallel, over gloo."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from scripts.baselines.trainer.serving import serve
from scripts.baselines.trainer.workload import Workload, plain_optimizer

_TIMEOUT = timedelta(seconds=170)


class _Gradients(torch.nn.Module):
    """Parameters whose gradients are what they are told to be."""

    def __init__(self, shapes: list[list[int]]) -> None:
        super().__init__()
        self.values = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape)) for shape in shapes)
        self._gradients = [torch.empty(shape) for shape in shapes]

    def seed(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for gradient in self._gradients:
            gradient.normal_(std=1e-3, generator=generator)

    def forward(self) -> torch.Tensor:
        pairs = zip(self.values, self._gradients, strict=True)
        return torch.stack([(value * gradient).sum() for value, gradient in pairs]).sum()


class GlooMember:
    """One rank; groups come and go."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._trained: DistributedDataParallel | None = None

    def open(self, rank: int, members: int, store: str, interface: str) -> dict[str, Any]:
        """Joins a group of so many ranks, which find each other by the file ``store``."""
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=members, timeout=_TIMEOUT)
        return {}

    def round(self, values: int, seed: int) -> dict[str, Any]:
        """One all-reduce and the division that makes it a mean."""
        vector = torch.randn(values, generator=torch.Generator().manual_seed(seed))
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        dist.all_reduce(vector)
        vector /= dist.get_world_size()
        cpu_s = time.process_time() - began_cpu_s
        return {"from_s": began_s, "until_s": time.monotonic(), "round_cpu_s": cpu_s}

    def train(self, workload: dict[str, Any], rank: int, members: int, steps: int) -> dict[str, Any]:
        """Steps of DDP; the model of an earlier request is gone on with, so that its buckets are in their order."""
        made = Workload(**workload)
        if self._trained is None:
            self._trained = DistributedDataParallel(made.model(), gradient_as_bucket_view=True)
            self._optimizer = plain_optimizer(self._trained.parameters())
            self._batches = made.batches(rank, members)
        seconds = []
        for _ in range(steps):
            began_s = time.monotonic()
            batch = next(self._batches)
            self._optimizer.zero_grad(set_to_none=True)
            loss = self._trained(batch["input_ids"], batch["labels"])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._trained.parameters(), 1.0)
            self._optimizer.step()
            seconds.append(time.monotonic() - began_s)
        return {"tokens": steps * made.tokens_per_step, "steps_s": seconds, "loss": loss.item()}

    def hook(self, shapes: list[list[int]], rank: int, seeds: list[int]) -> dict[str, Any]:
        """Steps of DDP whose gradients are random vectors of these shapes; with torch's PowerSGD hook, or plain (0).

        Its processor time is that of a backward pass, which does nothing but hand the gradients over.
        """
        holder = _Gradients(shapes)
        trained = DistributedDataParallel(holder, gradient_as_bucket_view=True, bucket_cap_mb=1 << 12)
        if rank:
            state = PowerSGDState(None, rank, start_powerSGD_iter=2, warm_start=True, use_error_feedback=True)
            trained.register_comm_hook(state, powerSGD_hook)
        seconds = []
        for seed in seeds:
            holder.seed(seed)
            trained.zero_grad(set_to_none=True)
            loss = trained()
            began_s = time.process_time()
            loss.backward()
            seconds.append(time.process_time() - began_s)
        return {"steps_cpu_s": seconds}

    def close(self) -> dict[str, Any]:
        """Leaves the group."""
        self._trained = None
        dist.destroy_process_group()
        return {}


if __name__ == "__main__":
    member = GlooMember()
    serve(
        {
            "open": member.open,
            "round": member.round,
            "train": member.train,
            "hook": member.hook,
            "close": member.close,
        }
    )
