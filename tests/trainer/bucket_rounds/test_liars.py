"""Liars in everything that a member puts into a bucket, in runs that train: what they cost an honest run."""

from __future__ import annotations

import pytest

from scripts.trainer_bench.bucket_liars import ASKED, GROUPS, trained
from scripts.trainer_bench.liars import Setting


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("num_members", "num_liars"), GROUPS)
def test_liars_cost_at_most_a_twentieth_of_the_loss(num_members: int, num_liars: int) -> None:
    setting = Setting(num_rounds=6)
    honest, _ = trained(num_members, 0, "", setting)
    for lie in ("x -10", "sign flipped"):
        loss, newcomer = trained(num_members, num_liars, lie, setting)
        assert loss <= ASKED * honest, f"{lie}: {loss:.4f} of {honest:.4f}"
        assert newcomer == "the right", lie
