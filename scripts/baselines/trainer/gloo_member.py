"""The baseline inside clusters: all-reduce, and DistributedDataParallel, over gloo."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from scripts.baselines.trainer.serving import serve
from scripts.baselines.trainer.workload import Workload, plain_optimizer

_TIMEOUT = timedelta(seconds=170)


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

    def close(self) -> dict[str, Any]:
        """Leaves the group."""
        self._trained = None
        dist.destroy_process_group()
        return {}


if __name__ == "__main__":
    member = GlooMember()
    serve({"open": member.open, "round": member.round, "train": member.train, "close": member.close})
