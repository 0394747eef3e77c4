"""The whole model in one process: micro-batches one after another, an AdamW step after so many; nothing else."""

from __future__ import annotations

import time
from typing import Any

import torch

from scripts.baselines.swarm.stage_call import session_cpu_s
from scripts.baselines.trainer.serving import serve
from scripts.baselines.trainer.workload import Workload, plain_optimizer


class WholeMember:
    """One process."""

    def open(self, workload: dict[str, Any], threads: int, micro_batches: int) -> dict[str, Any]:
        """Makes model and optimizer, and takes a step."""
        torch.set_num_threads(threads)
        self._workload = Workload(**workload)
        self._micro_batches = micro_batches
        self._model = self._workload.model()
        self._optimizer = plain_optimizer(self._model.parameters())
        self._batches = self._workload.batches(0, 1)
        self._step()
        return {"parameters": sum(parameter.numel() for parameter in self._model.parameters())}

    def train(self, seconds: float) -> dict[str, Any]:
        """Steps until the time is up."""
        began_s, began_cpu_s, steps, loss = time.monotonic(), session_cpu_s(), 0, 0.0
        while time.monotonic() < began_s + seconds:
            loss = self._step()
            steps += 1
        return {
            "tokens": steps * self._micro_batches * self._workload.tokens_per_step,
            "seconds": time.monotonic() - began_s,
            "session_cpu_s": session_cpu_s() - began_cpu_s,
            "loss": loss,
        }

    def _step(self) -> float:
        self._optimizer.zero_grad(set_to_none=True)
        loss_sum = torch.zeros(())
        for _ in range(self._micro_batches):
            batch = next(self._batches)
            loss = self._model(batch["input_ids"], batch["labels"]) / self._micro_batches
            loss.backward()
            loss_sum += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return loss_sum.item()


if __name__ == "__main__":
    member = WholeMember()
    serve({"open": member.open, "train": member.train})
