from __future__ import annotations

import pytest
import torch

from tests.support.rank_group import run_ranks
from tests.support.rank_scenarios import every_step
from tests.support.toy_models import Quadratic, Regression
from trainer.errors import CheckpointMismatchError, TrainerUsageError
from trainer.outer.engine.ddp import EveryStepStrategy, ddp_model
from trainer.outer.engine.strategy import OuterStrategy


@pytest.mark.slow
def test_gradients_are_averaged_in_every_step(tmp_path) -> None:
    first, second = run_ranks(every_step, 2, tmp_path)
    assert torch.equal(first["parameters"], second["parameters"])
    assert first["state"] == {"version": 1, "num_steps": 5}
    model, other = Regression(0), Regression(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        other.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        other.zero_grad()
        model(step).backward()
        other(step).backward()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.grad.add_(theirs.grad).div_(2)
        optimizer.step()
    alone = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    torch.testing.assert_close(first["parameters"], alone)


def test_the_strategy_counts_and_does_nothing_else() -> None:
    strategy = EveryStepStrategy()
    assert isinstance(strategy, OuterStrategy)
    assert strategy.after_inner_step() is None and strategy.drain() is None
    again = EveryStepStrategy()
    again.load_state_dict(strategy.state_dict())
    again.after_inner_step()
    assert again.state_dict()["num_steps"] == 2
    with pytest.raises(CheckpointMismatchError, match="every-step state of version 1"):
        again.load_state_dict({"version": 1, "round_index": 3})


def test_without_a_process_group_the_way_out_is_named() -> None:
    with pytest.raises(TrainerUsageError, match="torchrun"):
        ddp_model(Quadratic(0))
