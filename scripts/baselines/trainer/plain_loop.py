"""The training loop one writes by hand: same model, same optimizer, same batches, which lie in memory; nothing else.

Prints a line a step, as ours does with ``--json``, so that the two can be let run in turn by their lines.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import torch

from trainer.model import build_model, preset


def main(options: dict[str, Any]) -> None:
    """Trains until it is killed."""
    torch.set_num_threads(options["threads"])
    batches = torch.load(options["batches"], weights_only=True)
    model = build_model(preset(options["preset"], options["vocab_rows"]), 0, device=torch.device("cpu"))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95))
    parameters = list(model.parameters())
    model.train()
    for step in range(sys.maxsize):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
        inputs, labels = batches[step % len(batches)]
        optimizer.zero_grad(set_to_none=True)
        loss = model(inputs, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        sys.stdout.write(json.dumps({"kind": "step", "step": step, "loss": loss.item()}) + "\n")
        sys.stdout.flush()


def lr_at(step: int) -> float:
    """000's cosine: 1,000 steps of warm-up, then down to a tenth at 50,000."""
    if step < 1000:
        return 1e-4 * step / 1000
    share = min(1.0, (step - 1000) / 49_000)
    return 1e-5 + 9e-5 * (1 + math.cos(math.pi * share)) / 2


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
