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
LR = 1.2e-2


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


def held_out(model: nn.Module) -> float:
    windows = language(128, seed=99)
    with torch.no_grad():
        return float(model(windows[:, :-1], windows[:, 1:]))


def learn(reader: nn.Module, optimizer: torch.optim.Optimizer, step: int, num_steps: int) -> None:
    # The rate falls to a tenth, as in a real run: else what is compared is the noise of the last steps.
    optimizer.param_groups[0]["lr"] = LR * (1 - 0.9 * step / num_steps)
    optimizer.zero_grad()
    reader(step).backward()
    optimizer.step()


def on_its_own(windows: Tensor, rows: int, num_steps: int) -> float:
    """One model on one stream of data."""
    reader = Reader(windows, rows)
    optimizer = torch.optim.AdamW(reader.parameters(), lr=LR)
    for step in range(num_steps):
        learn(reader, optimizer, step, num_steps)
    return held_out(reader.transformer)


def by_sparta(data: list[Tensor], num_steps: int, config: SpartaConfig) -> list[float]:
    """Held-out loss of each replica. A round that begins in a step ends in the next, behind that step's own update."""
    group = ReplicaGroup(NUM_REPLICAS)
    replicas = [
        Replica(config, MeetingCollective(group, rank), model=Reader(windows, ROWS), lr=LR)
        for rank, windows in enumerate(data)
    ]
    for step in range(num_steps):
        for replica in replicas:
            learn(replica.model, replica.optimizer, step, num_steps)
        for replica in replicas:
            replica.drain()
        for replica in replicas:
            replica.turn()
    for replica in replicas:
        replica.drain()
    assert all(result.committed for replica in replicas for result in replica.results)
    return [held_out(replica.model.transformer) for replica in replicas]


@pytest.mark.long
def test_replicas_learn_nearly_as_well_as_with_every_gradient_averaged() -> None:
    num_steps = 200
    data = [language(num_steps * ROWS, seed=rank) for rank in range(NUM_REPLICAS)]
    # One model on all replicas' rows of each step: what averaging gradients every step computes.
    rows = torch.cat([windows.view(num_steps, ROWS, -1) for windows in data], dim=1).flatten(0, 1)
    together = on_its_own(rows, ROWS * NUM_REPLICAS, num_steps)
    alone = on_its_own(data[0], ROWS, num_steps)
    learned = by_sparta(data, num_steps, SpartaConfig(every_steps=2, num_slices=8))
    assert max(learned) < min(alone, 1.03 * together)
