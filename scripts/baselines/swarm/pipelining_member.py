"""torch.distributed.pipelining over gloo: the same stages, GPipe's or 1F1B's order, an AdamW step of each rank's own.

The readout is in the loss function and not in the last stage, so that it computes what ours does, logits in pieces.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from scripts.baselines.swarm.stage_call import session_cpu_s
from scripts.baselines.trainer.serving import serve
from scripts.baselines.trainer.workload import Workload, plain_optimizer
from trainer.model import build_stage, preset
from trainer.model.plan import StagePlan
from trainer.model.stages import TailStage

_TIMEOUT = timedelta(seconds=100)
_SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
_SEED = 0


class _Hidden(nn.Module):
    """A tail up to its readout."""

    def __init__(self, tail: TailStage) -> None:
        super().__init__()
        self.tail = tail

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states."""
        return self.tail.layers(hidden)


class PipeliningMember:
    """One rank."""

    def open(
        self, workload: dict[str, Any], rank: int, ranks: int, store: str, interface: str, micro_batches: int
    ) -> dict[str, Any]:
        """Joins the group, makes stage and optimizer."""
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=_TIMEOUT)
        self._workload = Workload(**workload)
        self._rank, self._ranks, self._micro_batches = rank, ranks, micro_batches
        plan = StagePlan.of(preset(self._workload.preset, self._workload.vocab_rows), ranks)
        stage = build_stage(plan.config, plan.ranges, rank, _SEED)
        self._module: nn.Module = _Hidden(stage) if isinstance(stage, TailStage) else stage
        self._readout = stage.readout if isinstance(stage, TailStage) else None
        self._optimizer = plain_optimizer(self._module.parameters())
        self._batches = self._workload.batches(0, 1)
        self._schedules: dict[str, Any] = {}
        return {}

    def train(self, schedule: str, steps: int) -> dict[str, Any]:
        """So many steps."""
        if schedule not in self._schedules:
            stage = PipelineStage(self._module, self._rank, self._ranks, torch.device("cpu"))
            self._schedules[schedule] = _SCHEDULES[schedule](stage, self._micro_batches, loss_fn=self._loss)
        began_s, began_cpu_s, losses = time.monotonic(), session_cpu_s(), [torch.zeros(())]
        for _ in range(steps):
            losses = self._step(self._schedules[schedule])
        return {
            "tokens": steps * self._micro_batches * self._workload.tokens_per_step,
            "seconds": time.monotonic() - began_s,
            "session_cpu_s": session_cpu_s() - began_cpu_s,
            "loss": torch.stack(losses).mean().item(),
        }

    def _step(self, schedule: Any) -> list[Tensor]:
        parts = [next(self._batches) for _ in range(self._micro_batches)]
        self._optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        if self._rank == 0:
            schedule.step(torch.cat([part["input_ids"] for part in parts]))
        elif self._rank == self._ranks - 1:
            schedule.step(target=torch.cat([part["labels"] for part in parts]), losses=losses)
        else:
            schedule.step()
        torch.nn.utils.clip_grad_norm_(self._module.parameters(), 1.0)
        self._optimizer.step()
        return [loss.detach() for loss in losses] or [torch.zeros(())]

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        if self._readout is None:
            raise SystemExit("expected the last stage to be a tail")
        total, num_tokens = self._readout.loss_sum(hidden, labels)
        return total / num_tokens


if __name__ == "__main__":
    member = PipeliningMember()
    serve({"open": member.open, "train": member.train})
