"""A step: what it applies, drops and tells; at which rate parameters learn; how a saved state goes on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.model_configs import batches, small_model
from tests.support.rank_scenarios import SKIPPED, Odd, odd_steps, run_ranks
from trainer.errors import CheckpointMismatchError, NonFiniteTrainingError, TrainerUsageError
from trainer.inner import InnerConfig, InnerLoop, lr_at, make_optimizer, parameter_groups

CPU = torch.device("cpu")
FAST = InnerConfig(lr=1e-2, warmup_steps=4, decay_end_step=100, max_grad_norm=2.0)


def _loop(
    model: nn.Module,
    data: Iterable[dict[str, Tensor]],
    config: InnerConfig = FAST,
    on_loss: Callable[[float], object] | None = None,
) -> InnerLoop:
    return InnerLoop(model, make_optimizer(model, config), config, iter(data), CPU, on_loss=on_loss)


def _bits(loop: InnerLoop, model: nn.Module) -> bytes:
    """Parameters, moments and AdamW's own counts."""
    moments = loop.state_dict()["optimizer"]["state"].values()
    tensors = [*model.state_dict().values(), *(tensor for state in moments for tensor in state.values())]
    return b"".join(tensor.numpy().tobytes() for tensor in tensors)


def _poisoned(kinds: Iterable[int]) -> Iterator[dict[str, Tensor]]:
    """Good batches where the kind is 0."""
    for kind, batch in zip(kinds, batches(5), strict=False):
        if kind:
            batch["input_ids"][0, 0] = kind
        yield batch


@pytest.mark.slow
def test_it_is_bit_for_bit_the_plain_loop_of_torch() -> None:
    model = small_model()
    plain = copy.deepcopy(model)
    optimizer = make_optimizer(plain, FAST)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    loop, losses = _loop(model, batches(1)), []
    clipped = 0
    for step, batch in enumerate(islice(batches(1), 30)):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, FAST)
        optimizer.zero_grad()
        loss = plain(batch["input_ids"], batch["labels"])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, FAST.max_grad_norm)
        clipped += norm > FAST.max_grad_norm
        optimizer.step()
        result = loop.step()
        losses.append(result.loss)
        assert (result.step, result.loss, result.grad_norm) == (step, loss.item(), norm.item())
    assert 0 < clipped < 30
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))


def test_accumulated_batches_count_by_their_tokens_and_one_without_a_label_that_counts_takes_nothing() -> None:
    rows = next(batches(1, num_rows=6))
    rows["labels"] = rows["labels"].clone()
    rows["labels"][0, 1:] = -100
    parts = [{name: ids[start:stop] for name, ids in rows.items()} for start, stop in ((0, 1), (1, 2), (2, 6))]
    whole, parted = small_model(), small_model()
    losses: list[float] = []
    one = _loop(whole, [rows])
    three = _loop(parted, parts, InnerConfig(accumulation_steps=3), losses.append)
    expected, found = one.step(), three.step()
    assert expected.num_tokens == found.num_tokens == 1 + 8 + 4 * 8
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert losses[0] != pytest.approx(found.loss, rel=1e-3)
    rows = next(batches(1))
    empty = {"input_ids": rows["input_ids"], "labels": torch.full_like(rows["labels"], -100)}
    losses.clear()
    alone = _loop(small_model(), [rows]).step()
    loop = _loop(small_model(), [empty, rows, empty, empty], InnerConfig(accumulation_steps=2), losses.append)
    beside, nothing = loop.step(), loop.step()
    assert (beside.loss, beside.grad_norm, beside.num_tokens) == (alone.loss, alone.grad_norm, alone.num_tokens)
    assert nothing.skipped
    assert nothing.num_tokens == 0
    assert [math.isnan(loss) for loss in losses] == [True, False, True, True]


@pytest.mark.parametrize("kind", [-1, -2, -3])
def test_a_step_that_is_not_finite_touches_nothing_but_is_counted(kind: int) -> None:
    model = Odd()
    losses: list[float] = []
    accumulating = _loop(model, _poisoned([0, kind, 0]), InnerConfig(accumulation_steps=3))
    before = _bits(accumulating, model)
    assert accumulating.step().skipped
    assert _bits(accumulating, model) == before, "one bad batch among those accumulated drops the step"
    loop = _loop(model, _poisoned([0, 0, kind, 0]), on_loss=losses.append)
    loop.step(), loop.step()
    before = _bits(loop, model)
    result = loop.step()
    assert result.skipped
    assert _bits(loop, model) == before
    assert (result.step, loop.step_index, loop.skipped_steps) == (2, 3, 1)
    after = loop.step()
    assert not after.skipped
    assert (after.step, after.lr) == (3, lr_at(3, FAST))
    assert _bits(loop, model) != before
    assert len(losses) == 4


def test_ten_in_a_row_end_the_run_with_the_state_whole() -> None:
    model = Odd()
    loop = _loop(model, _poisoned([0, 0] + [-3] * 9 + [0] + [-3] * 10 + [0]))
    skipped = [loop.step().skipped for _ in range(21)]
    assert skipped == [False] * 2 + [True] * 9 + [False] + [True] * 9
    before = _bits(loop, model)
    restarted = _loop(model, _poisoned([-3]))
    restarted.load_state_dict(loop.state_dict())
    for each in (loop, restarted):
        with pytest.raises(NonFiniteTrainingError, match=r"loss nan .* at step 21, the last of 10 such steps in a row"):
            each.step()
        assert _bits(each, model) == before
        assert (each.step_index, each.skipped_steps) == (22, 19)


def test_a_late_joiner_takes_up_the_schedule_and_data_that_end_make_a_last_smaller_step() -> None:
    config = InnerConfig(accumulation_steps=2)
    loop = _loop(small_model(), islice(batches(1), 3), config)
    assert loop.step().num_tokens == 64
    loop.set_step(77)
    last = loop.step()
    assert (last.step, last.lr, last.num_tokens) == (77, lr_at(77, config), 32)
    with pytest.raises(StopIteration):
        loop.step()
    assert loop.step_index == 78
    with pytest.raises(TrainerUsageError, match="global_step"):
        loop.set_step(-1)


@pytest.mark.slow
def test_under_ddp_all_ranks_apply_or_drop_a_step_alike(tmp_path: Path) -> None:
    """Infinite loss, infinite gradient or no label at one of them: none goes its own way, and none waits in vain."""
    first, second = run_ranks(odd_steps, 2, tmp_path)
    assert first["skipped"] == second["skipped"] == SKIPPED
    before = None
    for here, there, skipped in zip(first["parameters"], second["parameters"], SKIPPED, strict=True):
        assert torch.isfinite(here).all()
        assert torch.equal(here, there)
        assert before is None or torch.equal(here, before) == skipped
        before = here


def test_norms_and_vectors_do_not_decay_and_everything_else_that_is_trained_does_once() -> None:
    optimizer = make_optimizer(small := small_model(), InnerConfig(weight_decay=0.2))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    of_norms = {id(parameter) for name, parameter in small.named_parameters() if "norm" in name}
    decayed, plain = ([id(parameter) for parameter in group["params"]] for group in optimizer.param_groups)
    assert set(plain) == of_norms
    assert len(decayed) == len(list(small.parameters())) - len(plain)
    model = nn.Sequential(nn.LayerNorm((2, 3)), nn.Linear(3, 3), nn.Linear(3, 3, bias=False).requires_grad_(False))
    decayed, plain = parameter_groups(model)
    assert [tuple(parameter.shape) for parameter in decayed] == [(3, 3)]
    assert [tuple(parameter.shape) for parameter in plain] == [(2, 3), (2, 3), (3,)]
    one, other = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    other.weight = one.weight
    assert len(parameter_groups(nn.Sequential(one, other))[0]) == 1
    with pytest.raises(TrainerUsageError, match="trainable"):
        make_optimizer(nn.Linear(2, 2).requires_grad_(False), InnerConfig())


def test_a_state_goes_on_under_the_new_options_with_the_last_rate_until_the_next_step() -> None:
    first = _loop(small_model(), batches(1), InnerConfig(warmup_steps=2))
    first.step(), first.step()
    second = _loop(small_model(), batches(1), InnerConfig(weight_decay=0.5, betas=(0.7, 0.8)))
    second.load_state_dict(first.state_dict())
    was, found = (loop.state_dict()["optimizer"] for loop in (first, second))
    options = [(group["weight_decay"], group["betas"], group["lr"]) for group in found["param_groups"]]
    assert options == [(0.5, (0.7, 0.8), 5e-5), (0.0, (0.7, 0.8), 5e-5)]
    assert all(torch.equal(found["state"][key]["exp_avg"], each["exp_avg"]) for key, each in was["state"].items())


def test_a_state_of_another_model_or_form_is_refused_and_changes_nothing() -> None:
    config, wide, narrow = InnerConfig(), nn.Linear(4, 5), nn.Linear(4, 3)
    optimizer = make_optimizer(wide, config)
    wide(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    loop = _loop(narrow, ())
    state = {**loop.state_dict(), "step_index": 9}
    for other, message in (
        (optimizer.state_dict(), r"expected shape \(3, 4\), found \(5, 4\)"),
        (_loop(small_model(), ()).state_dict()["optimizer"], "parameters by group"),
    ):
        with pytest.raises(CheckpointMismatchError, match=message):
            loop.load_state_dict({**state, "optimizer": other})
    for other_form in ({}, {"version": 2}, {"version": 1, "step_index": "x"}):
        with pytest.raises(CheckpointMismatchError, match="expected"):
            loop.load_state_dict(other_form)
    assert loop.step_index == 0


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({}, {500: 5e-5, 50_000: 1e-5, 50_001: 1e-5, 10**9: 1e-5}),
        ({"schedule": "linear"}, {25_500: 5.5e-5, 50_000: 1e-5, 50_001: 1e-5, 10**9: 1e-5}),
        ({"schedule": "constant", "warmup_steps": 10, "decay_end_step": 0}, {5: 5e-5, 10: 1e-4, 10**6: 1e-4}),
        ({"warmup_steps": 0}, {0: 1e-4}),
    ],
)
def test_rates_at_steps_of_note(options: dict[str, Any], rates: dict[int, float]) -> None:
    """Half-way through the warm-up and the fall, at its end and long after it; a constant rate needs no end."""
    config = InnerConfig(**options)
    assert {step: lr_at(step, config) for step in rates} == pytest.approx(rates, rel=1e-12)
    table = {0: "0.00e+00", 1000: "1.00e-04", 25_000: "5.64e-05", 50_000: "1.00e-05"}  # Of the specification.
    assert {step: f"{lr_at(step, InnerConfig()):.2e}" for step in table} == table


@given(
    schedule=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    warmup=st.integers(0, 2000),
    length=st.integers(1, 5000),
    ratio=st.floats(0, 1),
    step=st.integers(0, 8000),
)
def test_it_rises_through_the_warm_up_and_never_rises_again(schedule, warmup, length, ratio, step):
    config = InnerConfig(
        schedule=schedule, warmup_steps=warmup, decay_end_step=warmup + length, min_lr_ratio=ratio, lr=1.0
    )
    now, later = lr_at(step, config), lr_at(step + 1, config)
    assert 0.0 <= now <= 1.0
    assert later > now if step < warmup else later <= now
    assert now >= ratio - 1e-12 or step < warmup


@pytest.mark.parametrize(
    ("value", "fields"),
    [
        (0, ["lr", "eps", "max_grad_norm", "accumulation_steps", "seq_len", "max_skipped_in_a_row"]),
        (-1, ["weight_decay", "warmup_steps", "decay_end_step", "min_lr_ratio", "micro_batch_size"]),
        (1.5, ["min_lr_ratio"]),
        (math.nan, ["lr", "eps", "weight_decay", "max_grad_norm", "min_lr_ratio"]),
        ("other", ["schedule", "precision", "compile"]),
        ((0.9, 1.0), ["betas"]),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(value: object, fields: list[str]) -> None:
    for field in fields:
        with pytest.raises(TrainerUsageError, match=rf"^{field}: expected .*, found "):
            InnerConfig(**{field: value})
