"""The loop one writes by hand for several ranks, with DDP or FSDP2: same model, optimizer, batches; nothing else.

Each rank takes its rows of batches that lie in memory. Rank 0 prints a line a step with the mean loss of all ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.baselines.trainer.plain_loop import lr_at
from trainer.inner.parallel import BUFFERS_STAY
from trainer.model import build_model, preset


def main(options: dict[str, Any]) -> None:
    """Trains until it is killed."""
    torch.set_num_threads(options["threads"])
    dist.init_process_group("gloo")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    batches = torch.load(options["batches"], weights_only=True)
    model: torch.nn.Module = build_model(preset(options["preset"], options["vocab_rows"]), 0, device="cpu")
    if options["parallel"] == "fsdp":
        mesh = init_device_mesh("cpu", (size,))
        for block in model.get_submodule("layers").children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, **BUFFERS_STAY)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
    parameters = list(model.parameters())
    model.train()
    for step in range(sys.maxsize):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
        inputs, labels = (ids[rank::size] for ids in batches[step % len(batches)])
        optimizer.zero_grad(set_to_none=True)
        loss = model(inputs, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            sys.stdout.write(json.dumps({"kind": "step", "step": step, "loss": mean.item() / size}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
