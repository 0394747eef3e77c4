"""The learning rate by steps and by tokens, and how it rises again at a node that was away."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.model_configs import batches, small_model
from trainer.errors import TrainerUsageError
from trainer.inner import InnerConfig, InnerLoop, lr_at, make_optimizer
from trainer.inner.schedule import ScheduleClock

WSD = InnerConfig(schedule="wsd", lr=1.0, warmup_steps=10, decay_end_step=110, decay_steps=40, min_lr_ratio=0.2)
AWAY = InnerConfig(lr=1.0, schedule="constant", warmup_steps=0, rewarm_steps=4, rewarm_after_steps=100)


def test_wsd_stays_until_the_decay_and_ends_where_the_others_do() -> None:
    rates = {0: 0.0, 5: 0.5, 10: 1.0, 70: 1.0, 90: 0.6, 110: 0.2, 10**6: 0.2}
    assert {step: lr_at(step, WSD) for step in rates} == pytest.approx(rates)
    longer = replace(WSD, decay_end_step=500)
    assert all(lr_at(step, WSD) == lr_at(step, longer) for step in range(71)), "a plan can be made longer until then"
    fifth = replace(WSD, decay_steps=0)
    assert [lr_at(step, fifth) for step in (90, 100, 110)] == pytest.approx([1.0, 0.6, 0.2])


@given(
    schedule=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    warmup=st.integers(0, 50),
    length=st.integers(1, 200),
    tokens=st.integers(1, 10**6),
    step=st.integers(0, 400),
)
def test_a_schedule_in_tokens_is_that_in_steps_where_all_steps_are_alike(schedule, warmup, length, tokens, step):
    in_steps = InnerConfig(schedule=schedule, warmup_steps=warmup, decay_end_step=warmup + length, decay_steps=1)
    in_tokens = InnerConfig(
        schedule=schedule,
        warmup_tokens=warmup * tokens,
        decay_end_tokens=(warmup + length) * tokens,
        decay_tokens=tokens,
    )
    assert lr_at(step, in_tokens, step * tokens) == pytest.approx(lr_at(step, in_steps), rel=1e-12)


def test_a_batch_of_another_size_leaves_the_length_in_tokens_as_it_is() -> None:
    data = [next(batches(1, num_rows=rows)) for rows in (2, 2, 8, 8)]
    config = InnerConfig(lr=1.0, schedule="linear", decay_end_tokens=160, min_lr_ratio=0.0)
    model = small_model()
    loop = InnerLoop(model, make_optimizer(model, config), config, iter(data), torch.device("cpu"))
    rates = [loop.step().lr for _ in data]
    assert rates == pytest.approx([1.0, 0.9, 0.8, 0.4]), "16 tokens a step, then 64"
    assert loop.num_tokens == 160
    assert loop.state_dict()["num_tokens"] == 160


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"schedule": "wsd", "decay_steps": 60_000}, "decay_steps"),
        ({"warmup_tokens": 5}, "warmup_tokens"),
        ({"decay_tokens": 5}, "decay_tokens"),
        ({"decay_end_tokens": 10, "warmup_tokens": 10}, "decay_end_tokens"),
        ({"decay_end_tokens": 10, "decay_tokens": 11}, "decay_tokens"),
        ({"decay_end_tokens": -1}, "decay_end_tokens"),
        ({"rewarm_steps": -1}, "rewarm_steps"),
        ({"rewarm_after_steps": 0}, "rewarm_after_steps"),
    ],
)
def test_lengths_that_make_no_sense_are_refused_by_name(options: dict[str, object], name: str) -> None:
    with pytest.raises(TrainerUsageError, match=f"^{name}:"):
        InnerConfig(**options)  # type: ignore[arg-type]


def rates(clock: ScheduleClock, num_steps: int) -> list[float]:
    found = []
    for _ in range(num_steps):
        found.append(clock.lr)
        clock.count(8)
    return found


def test_the_rate_rises_again_after_a_long_absence_only() -> None:
    clock = ScheduleClock(AWAY, step_index=50)
    clock.move_to(149)
    assert rates(clock, 2) == [1.0, 1.0], "one step less than counts as long"
    clock.move_to(251)
    assert rates(clock, 3) == [0.25, 0.5, 0.75]
    clock.move_to(255)
    assert rates(clock, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0], "state that went on while it was fetched"
    assert clock.rewarm_from is None
    clock.move_to(200)
    assert rates(clock, 1) == [1.0], "others that are further back"
    off = ScheduleClock(replace(AWAY, rewarm_steps=0))
    off.move_to(10**6)
    assert rates(off, 1) == [1.0]


def test_a_joiner_counts_the_tokens_of_the_steps_it_missed_at_its_own_batch() -> None:
    config = replace(AWAY, micro_batch_size=4, accumulation_steps=2, seq_len=8)
    clock = ScheduleClock(config)
    clock.move_to(1000)
    assert clock.num_tokens == 1000 * 64
    assert ScheduleClock.of(config, {"step_index": 7}).num_tokens == 7 * 64, "a state of a release without the count"
    cluster = ScheduleClock(config, num_parts=3)
    cluster.move_to(10)
    assert cluster.num_tokens == 10 * 3 * 64, "ranks that read a batch each and count as one"
    again = ScheduleClock.of(config, {"step_index": 7}, num_parts=3)
    again.move_to(8)
    assert again.num_tokens == 8 * 3 * 64


@given(before=st.integers(0, 300), missed=st.integers(-50, 300), cut=st.integers(0, 8))
def test_a_clock_that_was_saved_anywhere_goes_on_alike(before: int, missed: int, cut: int) -> None:
    whole = ScheduleClock(AWAY, step_index=before, num_tokens=8 * before)
    whole.move_to(max(0, before + missed))
    rates(whole, cut)
    resumed = ScheduleClock.of(AWAY, whole.state_dict())
    assert (rates(resumed, 8), resumed.state_dict()) == (rates(whole, 8), whole.state_dict())


def test_a_loop_resumed_in_the_middle_of_a_second_warm_up_ends_with_the_same_bits() -> None:
    config = replace(AWAY, lr=1e-2)

    def begun(skip: int) -> tuple[torch.nn.Module, InnerLoop]:
        model, data = small_model(), batches(3)
        for _ in range(skip):
            next(data)
        return model, InnerLoop(model, make_optimizer(model, config), config, data, torch.device("cpu"))

    model, loop = begun(0)
    loop.step()
    loop.set_step(500)
    first = [loop.step().lr for _ in range(2)]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    saved = loop.state_dict()
    saved["optimizer"] = torch.utils._pytree.tree_map(
        lambda value: value.clone() if isinstance(value, torch.Tensor) else value, saved["optimizer"]
    )
    rest = [loop.step() for _ in range(4)]
    assert [*first, *(each.lr for each in rest)] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])

    again, resumed = begun(3)
    again.load_state_dict(weights)
    resumed.load_state_dict(saved)
    assert [(each.step, each.loss, each.lr) for each in (resumed.step() for _ in range(4))] == [
        (each.step, each.loss, each.lr) for each in rest
    ]
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))
