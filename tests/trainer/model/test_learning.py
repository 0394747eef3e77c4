from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from trainer.model import build_model, preset


def _language(num_ids: int, num_tokens: int) -> torch.Tensor:
    """Ids of which each has four followers: ln 4 nats a token to who knows the last id, ln num_ids to who does not."""
    generator = torch.Generator().manual_seed(0)
    followers = torch.stack([torch.randperm(num_ids, generator=generator) for _ in range(4)], dim=1)
    choices = torch.randint(0, 4, (num_tokens,), generator=generator)
    ids = [0]
    for choice in choices[1:].tolist():
        ids.append(int(followers[ids[-1], choice]))
    return torch.tensor(ids)


@pytest.mark.slow
@pytest.mark.parametrize("olmo2", [False, True])
def test_tiny_learns_quickly(olmo2: bool):
    num_ids, steps = 128, 60
    config = replace(preset("tiny", num_ids), qk_norm=olmo2, reorder_norm=olmo2)
    model = build_model(config, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    windows = _language(num_ids, steps * 8 * 33).view(steps, 8, 33)

    losses = []
    for window in windows:
        loss = model(window[:, :-1], window[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    assert losses[0] == pytest.approx(math.log(num_ids), rel=0.1)
    assert sum(losses[-5:]) / 5 < 0.6 * math.log(num_ids), losses
