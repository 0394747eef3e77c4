"""Slices of whole columns average what is bound to a subspace; slices of single values hardly do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.replica_group import MeetingCollective, ReplicaGroup
from tests.support.sparta_replicas import Replica
from trainer.outer.sparta import SpartaConfig

DIM, RANK, ROWS = 64, 4, 48


class Bound(nn.Module):
    """A projection's columns and an embedding's rows, all in the span of one basis."""

    def __init__(self, replica: int, basis: Tensor) -> None:
        super().__init__()
        seeded = torch.Generator().manual_seed(replica)
        self.o_proj = nn.Parameter(torch.randn(DIM, ROWS, generator=seeded))
        self.embedding = nn.Parameter(torch.randn(ROWS, DIM, generator=seeded))
        self.basis = basis
        self.project()

    @torch.no_grad()
    def project(self) -> None:
        self.o_proj.copy_(self.basis @ (self.basis.T @ self.o_proj))
        self.embedding.copy_(self.embedding @ self.basis @ self.basis.T)

    def distance(self) -> float:
        outside = self.o_proj - self.basis @ (self.basis.T @ self.o_proj)
        return float(outside.detach().norm() / self.o_proj.detach().norm())


def difference_left(kept_axes: dict[str, int]) -> tuple[float, float]:
    """Of two replicas after a cycle: the share of their difference, and the distance before the last projection."""
    basis = torch.linalg.qr(torch.randn(DIM, RANK, generator=torch.Generator().manual_seed(9))).Q
    group, farthest = ReplicaGroup(2), 0.0

    def project(model: nn.Module) -> None:
        nonlocal farthest
        assert isinstance(model, Bound)
        farthest = max(farthest, model.distance())
        model.project()

    replicas = [
        Replica(
            SpartaConfig(every_steps=1),
            MeetingCollective(group, rank),
            model=Bound(rank, basis),
            after_average=project,
            kept_axes=kept_axes,
        )
        for rank in range(2)
    ]

    def apart() -> float:
        return float((replicas[0].vector() - replicas[1].vector()).norm())

    start = apart()
    for _ in range(20):
        for replica in replicas:
            replica.turn()
        for replica in replicas:
            replica.drain()
    return apart() / start, farthest


def test_whole_columns_stay_in_the_subspace_and_single_values_do_not() -> None:
    left, farthest = difference_left({"o_proj": 0, "embedding": 1})
    assert left < 1e-6 and farthest < 1e-6
    left, farthest = difference_left({})
    assert left > 0.2 and farthest > 0.05
