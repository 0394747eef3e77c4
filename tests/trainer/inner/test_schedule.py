"""The learning rate of 000's table, and what every schedule has in common."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import TrainerUsageError
from trainer.inner import InnerConfig, lr_at


@pytest.mark.parametrize(
    ("step", "lr"), [(0, "0.00e+00"), (1000, "1.00e-04"), (25_000, "5.64e-05"), (50_000, "1.00e-05")]
)
def test_the_table_of_the_specification_holds_to_three_digits(step: int, lr: str) -> None:
    assert f"{lr_at(step, InnerConfig()):.2e}" == lr


def test_half_of_the_warm_up_is_half_of_the_rate() -> None:
    assert lr_at(500, InnerConfig()) == pytest.approx(5e-5, rel=1e-12)


def test_linear_is_half_way_in_the_middle_between_warm_up_and_end() -> None:
    assert lr_at(25_500, InnerConfig(schedule="linear")) == pytest.approx(5.5e-5, rel=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("step", [50_000, 50_001, 10**9])
def test_the_lowest_rate_is_reached_at_the_end_and_kept(schedule: str, step: int) -> None:
    assert lr_at(step, InnerConfig(schedule=schedule)) == pytest.approx(1e-5, rel=1e-12)


def test_constant_stays_at_the_highest_rate_and_needs_no_end() -> None:
    config = InnerConfig(schedule="constant", warmup_steps=10, decay_end_step=0)
    assert [lr_at(step, config) for step in (5, 10, 10**6)] == [5e-5, 1e-4, 1e-4]


def test_without_warm_up_the_first_step_has_the_highest_rate() -> None:
    assert lr_at(0, InnerConfig(warmup_steps=0)) == 1e-4


@given(
    schedule=st.sampled_from(["cosine", "linear", "constant"]),
    warmup=st.integers(0, 2000),
    length=st.integers(1, 5000),
    ratio=st.floats(0, 1),
    step=st.integers(0, 8000),
)
def test_it_rises_through_the_warm_up_and_never_rises_again(
    schedule: str, warmup: int, length: int, ratio: float, step: int
) -> None:
    config = InnerConfig(
        schedule=schedule, warmup_steps=warmup, decay_end_step=warmup + length, min_lr_ratio=ratio, lr=1.0
    )
    now, later = lr_at(step, config), lr_at(step + 1, config)
    assert 0.0 <= now <= 1.0
    assert later > now if step < warmup else later <= now
    assert now >= ratio - 1e-12 or step < warmup


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"lr": 0.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"schedule": "step"}, "schedule"),
        ({"precision": "fp16"}, "precision"),
        ({"compile": "yes"}, "compile"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"warmup_steps": 50_000}, "decay_end_step"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio"),
        ({"micro_batch_size": -1}, "micro_batch_size"),
        ({"accumulation_steps": 0}, "accumulation_steps"),
        ({"seq_len": 0}, "seq_len"),
        ({"max_skipped_in_a_row": 0}, "max_skipped_in_a_row"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(options: dict[str, object], field: str) -> None:
    with pytest.raises(TrainerUsageError, match=rf"^{field}: expected .*, found "):
        InnerConfig(**options)
