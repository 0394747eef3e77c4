"""A step: what it applies, what it drops, what it tells."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.rank_group import run_ranks
from tests.support.rank_scenarios import SKIPPED, odd_steps
from tests.support.small_model import VOCAB_SIZE, batches, small_model
from trainer.errors import NonFiniteTrainingError, TrainerUsageError
from trainer.inner import InnerConfig, InnerLoop, lr_at, make_optimizer

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


class Poisoned(nn.Module):
    """A model whose loss, or only whose gradient, is not finite where the first id says so."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_model()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids.clamp(min=0), labels)
        if input_ids[0, 0] == -1:
            return loss * math.nan
        if input_ids[0, 0] == -2:
            return loss * math.inf
        if input_ids[0, 0] == -3:  # The root of nothing: value 0, slope infinite.
            return loss + (self.model.embedding.weight[0, 0] * 0.0).abs().sqrt()
        return loss


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
    loop = _loop(model, batches(1))
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
        assert (result.step, result.loss, result.grad_norm) == (step, loss.item(), norm.item())
    assert 0 < clipped < 30
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.slow
def test_it_learns() -> None:
    loop = _loop(small_model(), batches(1))
    losses = [loop.step().loss for _ in range(60)]
    assert losses[0] == pytest.approx(math.log(VOCAB_SIZE), abs=0.3)
    assert losses[-1] < 1.5


def test_the_first_step_has_rate_zero_and_moves_no_parameter() -> None:
    model = small_model()
    before = copy.deepcopy(model.state_dict())
    assert _loop(model, batches(1)).step().lr == 0.0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_accumulated_batches_count_by_their_tokens() -> None:
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
    assert len(losses) == 3
    assert losses[0] != pytest.approx(found.loss, rel=1e-3)


def test_a_batch_without_a_label_that_counts_takes_nothing_from_the_others() -> None:
    rows = next(batches(1))
    empty = {"input_ids": rows["input_ids"], "labels": torch.full_like(rows["labels"], -100)}
    losses: list[float] = []
    alone = _loop(small_model(), [rows]).step()
    loop = _loop(small_model(), [empty, rows, empty, empty], InnerConfig(accumulation_steps=2), losses.append)
    beside, nothing = loop.step(), loop.step()
    assert (beside.loss, beside.grad_norm, beside.num_tokens) == (alone.loss, alone.grad_norm, alone.num_tokens)
    assert nothing.skipped
    assert nothing.num_tokens == 0
    assert [math.isnan(loss) for loss in losses] == [True, False, True, True]


def test_the_norm_that_is_clipped_is_that_of_the_whole_model() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, 1))

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            return (3.0 * self.one + 4.0 * self.other).sum()

    model = Two()
    seen: list[float] = []
    optimizer = make_optimizer(model, FAST)
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.item() for p in model.parameters()))
    result = InnerLoop(model, optimizer, FAST, batches(1), CPU).step()
    assert result.grad_norm == pytest.approx(5.0)
    assert seen == pytest.approx([1.2, 1.6], rel=1e-5)


@pytest.mark.parametrize("kind", [-1, -2, -3])
def test_a_step_that_is_not_finite_touches_nothing_but_is_counted(kind: int) -> None:
    model = Poisoned()
    losses: list[float] = []
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


def test_one_bad_batch_among_those_accumulated_drops_the_step() -> None:
    model = Poisoned()
    loop = _loop(model, _poisoned([0, -1, 0]), InnerConfig(accumulation_steps=3))
    before = _bits(loop, model)
    assert loop.step().skipped
    assert _bits(loop, model) == before


def test_ten_in_a_row_end_the_run_with_the_state_whole() -> None:
    model = Poisoned()
    loop = _loop(model, _poisoned([0, 0] + [-1] * 9 + [0] + [-1] * 10 + [0]))
    for _ in range(12):
        loop.step()
    before = _bits(loop, model)
    for _ in range(9):
        assert loop.step().skipped
    with pytest.raises(NonFiniteTrainingError, match=r"loss nan .* at step 21, the last of 10 such steps in a row"):
        loop.step()
    assert _bits(loop, model) == before
    assert (loop.step_index, loop.skipped_steps) == (22, 19)


def test_how_many_are_bad_in_a_row_outlives_a_restart() -> None:
    model = Poisoned()
    first = _loop(model, _poisoned([-1] * 9))
    for _ in range(9):
        first.step()
    second = _loop(model, _poisoned([-1]))
    second.load_state_dict(first.state_dict())
    with pytest.raises(NonFiniteTrainingError):
        second.step()


def test_data_that_end_make_a_last_smaller_step_and_then_stop() -> None:
    loop = _loop(small_model(), islice(batches(1), 3), InnerConfig(accumulation_steps=2))
    assert [loop.step().num_tokens, loop.step().num_tokens] == [64, 32]
    with pytest.raises(StopIteration):
        loop.step()
    assert loop.step_index == 2


def test_a_late_joiner_takes_up_the_schedule_of_the_others() -> None:
    loop = _loop(small_model(), batches(1))
    loop.set_step(77)
    result = loop.step()
    assert (result.step, result.lr, loop.step_index) == (77, lr_at(77, FAST), 78)
    with pytest.raises(TrainerUsageError, match="global_step"):
        loop.set_step(-1)


def test_gradients_left_by_someone_else_before_the_first_step_do_not_leak_into_it() -> None:
    clean, dirty = small_model(), small_model()
    batch = next(batches(9))
    dirty(batch["input_ids"]).square().sum().backward()
    assert _loop(dirty, batches(1)).step().grad_norm == _loop(clean, batches(1)).step().grad_norm


def test_the_model_is_put_back_into_training_mode() -> None:
    model = small_model().eval()
    _loop(model, batches(1)).step()
    assert model.training


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
