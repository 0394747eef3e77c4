"""SPARTA against averaging every gradient, on the same data: what is lost by sending a sixteenth."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.replica_group import MeetingCollective, Replica, ReplicaGroup
from trainer.model import ModelConfig, build_model
from trainer.outer.sparta import SpartaConfig

NUM_IDS, ROWS, POSITIONS, NUM_REPLICAS = 64, 4, 32, 3
SHAPE = ModelConfig(vocab_size=NUM_IDS, dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=64, max_seq_len=64)
LR, NUM_STEPS = 1.2e-2, 200
CONFIG = SpartaConfig(every_steps=2, num_slices=8)


def language(num_windows: int, seed: int) -> Tensor:
    """Ids of which each has eight followers, some likelier: 1.8 nats a token to who knows the last id."""
    shape = torch.Generator().manual_seed(0)
    followers = torch.stack([torch.randperm(NUM_IDS, generator=shape) for _ in range(8)], dim=1)
    chance = torch.tensor([8.0, 6, 4, 3, 2, 1, 1, 1])
    seeded = torch.Generator().manual_seed(seed)
    draws = torch.multinomial(chance, num_windows * (POSITIONS + 1), True, generator=seeded)
    draws = draws.view(POSITIONS + 1, num_windows)
    ids = [torch.randint(0, NUM_IDS, (num_windows,), generator=seeded)]
    for draw in draws[1:]:
        ids.append(followers[ids[-1], draw])
    return torch.stack(ids, dim=1)


class Reader(nn.Module):
    """A small transformer and what it reads, a batch a step."""

    def __init__(self, windows: Tensor, rows: int) -> None:
        super().__init__()
        self.transformer = build_model(SHAPE, 0)
        self.windows, self.rows = windows, rows

    def forward(self, step: int) -> Tensor:
        batch = self.windows[step * self.rows : (step + 1) * self.rows]
        return self.transformer(batch[:, :-1], batch[:, 1:])


def trained(data: list[Tensor], rows: int) -> list[float]:
    """Held-out loss of each replica; one alone averages with itself, which changes no bit."""
    group = ReplicaGroup(len(data))
    replicas = [
        Replica(CONFIG, MeetingCollective(group, rank), model=Reader(windows, rows), lr=LR)
        for rank, windows in enumerate(data)
    ]
    for step in range(NUM_STEPS):
        for replica in replicas:
            # The rate falls to a tenth, as in a real run: else what is compared is the noise of the last steps.
            replica.optimizer.param_groups[0]["lr"] = LR * (1 - 0.9 * step / NUM_STEPS)
            replica.step(step)
        for replica in replicas:  # A round that begins in a step ends in the next, behind that step's own update.
            replica.drain()
        for replica in replicas:
            replica.turn()
    for replica in replicas:
        replica.drain()
    assert all(result.committed for replica in replicas for result in replica.results)
    unseen = language(128, seed=99)
    with torch.no_grad():
        return [float(replica.model.transformer(unseen[:, :-1], unseen[:, 1:])) for replica in replicas]


@pytest.mark.long
def test_replicas_learn_nearly_as_well_as_with_every_gradient_averaged() -> None:
    data = [language(NUM_STEPS * ROWS, seed=rank) for rank in range(NUM_REPLICAS)]
    # One model on all replicas' rows of each step: what averaging gradients every step computes.
    rows = torch.cat([windows.view(NUM_STEPS, ROWS, -1) for windows in data], dim=1).flatten(0, 1)
    (together,), (alone,) = trained([rows], ROWS * NUM_REPLICAS), trained(data[:1], ROWS)
    assert max(trained(data, ROWS)) < min(alone, 1.03 * together)
