"""A model cut into stages gives the bits of the whole; its loss is that of cross entropy, a chunk at a time."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from tests.support.model_configs import random_tokens, small_config
from trainer.errors import TrainerUsageError
from trainer.model import ModelConfig, build_model, build_stage, split, stage_ranges
from trainer.model import loss as loss_module
from trainer.model.loss import IGNORED_LABEL, sum_of_losses

_CONFIGS = st.builds(
    small_config, qk_norm=st.booleans(), reorder_norm=st.booleans(), num_kv_heads=st.sampled_from([1, 2, 4])
)


@st.composite
def _cuts(draw: st.DrawFn) -> list[range]:
    """Any cut of four layers into two to six stages, of which some may be without layers."""
    inner = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    edges = [0, *sorted(inner), 4]
    return [range(start, stop) for start, stop in pairwise(edges)]


def _through_a_pipeline(stages: list[nn.Module], ids: Tensor, labels: Tensor) -> Tensor:
    """What a pipeline of nodes does: hidden states are handed on, gradients are handed back."""
    handed_on: list[tuple[Tensor, Tensor]] = []
    received = ids
    for stage in stages[:-1]:
        sent = stage(received)
        handed_on.append((sent, sent.detach().requires_grad_()))
        received = handed_on[-1][1]
    loss: Tensor = stages[-1](received, labels)
    loss.backward()
    for sent, received in reversed(handed_on):
        sent.backward(received.grad)
    return loss


@given(config=_CONFIGS, cut=_cuts(), seed=st.integers(0, 5))
def test_any_cut_gives_the_bits_of_the_whole(config: ModelConfig, cut: list[range], seed: int):
    whole = build_model(config, seed)
    ids, labels = random_tokens(config.vocab_size, 2, 9, seed=seed)
    loss = whole(ids, labels)
    loss.backward()
    alone = [build_stage(config, cut, index, seed) for index in range(len(cut))]
    loss_of_stages = _through_a_pipeline(alone, ids, labels)
    parts: dict[str, nn.Parameter] = {}
    for stage in alone:
        named = dict(stage.named_parameters())
        assert not parts.keys() & named.keys()
        parts |= named
    assert torch.equal(loss, loss_of_stages)
    assert parts.keys() == dict(whole.named_parameters()).keys()
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter.grad, parts[name].grad), name


def test_cuts_that_are_none_are_refused():
    whole = build_model(small_config(), 0)
    for stages in (0, 5, [range(0, 2), range(3, 4)], [range(0, 2), range(1, 4)], [range(2, 4), range(0, 2)], []):
        with pytest.raises(TrainerUsageError, match="stages"):
            split(whole, stages)
    with pytest.raises(TrainerUsageError, match="tie_embeddings"):
        split(build_model(small_config(tie_embeddings=True), 0), 2)
    with pytest.raises(TrainerUsageError, match="from 0 to 1, found 2"):
        build_stage(small_config(), stage_ranges(4, 2), 2, 0)


def test_the_loss_is_the_mean_over_the_tokens_that_count():
    model = build_model(small_config(), 0)
    ids, labels = random_tokens(64, 3, 7)
    labels = labels.clone()
    labels[0, 2:] = -100
    labels[2] = -100
    loss = model(ids, labels)
    expected = functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(loss, expected)
    assert loss.dtype is torch.float32
    model.zero_grad()
    nothing = model(ids, torch.full_like(labels, -100))
    nothing.backward()
    assert nothing.item() == 0
    assert all(torch.count_nonzero(parameter.grad) == 0 for parameter in model.parameters())


@pytest.mark.parametrize(("mode", "kept_share"), [(True, 0.25), ("full", 0.25), ("selective", 0.8)])
@pytest.mark.parametrize("olmo2", [False, True])
def test_activation_checkpointing_changes_no_bit_and_keeps_less(olmo2: bool, mode: str | bool, kept_share: float):
    config = small_config(qk_norm=olmo2, reorder_norm=olmo2)
    ids, labels = random_tokens(64, 2, 16)
    gradients, kept = [], []
    for checkpointing in (False, mode):
        model = build_model(config, 0, activation_checkpointing=checkpointing)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, sizes=sizes: sizes.append(tensor.numel()) or tensor, lambda tensor: tensor
        ):
            loss = model(ids, labels)
        kept.append(sum(sizes))
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(plain, again) for plain, again in zip(*gradients, strict=True))
    assert kept[1] < kept[0] * kept_share


@pytest.mark.parametrize("olmo2", [False, True])
def test_no_token_sees_a_later_one(olmo2: bool):
    model = build_model(small_config(qk_norm=olmo2, reorder_norm=olmo2), 0)
    ids, _ = random_tokens(64, 1, 20)
    changed = ids.clone()
    changed[0, 11:] = (changed[0, 11:] + 1) % 64
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[0, :11], after[0, :11], rtol=0, atol=1e-6)
    assert (before[0, 11:] != after[0, 11:]).any(dim=1).all()


def test_positions_matter_and_a_sequence_longer_than_the_longest_is_refused():
    model = build_model(small_config(), 0)
    logits = model(torch.tensor([[5, 9, 7], [9, 5, 7]]))
    assert not torch.allclose(logits[0, 2], logits[1, 2], atol=1e-4)
    with pytest.raises(TrainerUsageError, match="max_seq_len = 32 tokens, found 33"):
        model(torch.zeros(1, 33, dtype=torch.int64))


def test_bf16_stays_near_fp32():
    model = build_model(small_config(qk_norm=True, reorder_norm=True), 0)
    ids, labels = random_tokens(64, 2, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels)
        logits = model(ids)
    loss.backward()
    assert (loss.dtype, logits.dtype) == (torch.float32, torch.bfloat16)
    assert loss.item() == pytest.approx(model(ids, labels).item(), rel=0.01)
    assert all(parameter.grad.dtype is torch.float32 for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own, about its own
def test_the_whole_traces_into_one_graph():
    model = build_model(small_config(num_layers=2), 0)
    ids, labels = random_tokens(64, 2, 16)
    loss = model(ids, labels)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    traced = torch.compile(model, backend="aot_eager", fullgraph=True)(ids, labels)
    torch.testing.assert_close(traced, loss)
    torch.testing.assert_close(torch.autograd.grad(traced, list(model.parameters())), expected)


def _inputs(num_tokens: int, num_ids: int = 50, dim: int = 8, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, dim, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(num_ids, dim, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, num_ids, (num_tokens,), generator=generator)
    return hidden, weight, labels


def _reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum", ignore_index=IGNORED_LABEL)


@pytest.mark.slow
@given(num_tokens=st.integers(1, 700), ignored=st.floats(0, 1), seed=st.integers(0, 99))
def test_losses_and_gradients_are_those_of_cross_entropy_whatever_the_chunks(num_tokens, ignored, seed):
    hidden, weight, labels = _inputs(num_tokens, seed=seed)
    labels[torch.rand(num_tokens, generator=torch.Generator().manual_seed(seed)) < ignored] = IGNORED_LABEL
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "_CHUNK_LOGITS_CPU", 1)  # the least: 128 tokens
        ours = sum_of_losses(hidden, weight, labels)
    of_ours = torch.autograd.grad(ours * 0.25, (hidden, weight))
    reference = _reference(hidden, weight, labels)
    of_reference = torch.autograd.grad(reference * 0.25, (hidden, weight))
    assert ours.dtype is torch.float64
    torch.testing.assert_close(ours, reference)
    torch.testing.assert_close(of_ours, of_reference)


def test_an_infinite_logit_of_an_ignored_token_does_no_harm():
    hidden, weight, labels = _inputs(3)
    with torch.no_grad():
        hidden[1] = 1e200
    labels[1] = IGNORED_LABEL
    total = sum_of_losses(hidden, weight, labels)
    total.backward()
    assert torch.isfinite(total)
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad[[0, 2]]).all()


def test_nothing_of_the_size_of_all_logits_waits_for_the_backward_pass():
    hidden, weight, labels = _inputs(600, num_ids=900)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor, lambda kept: kept
    ):
        sum_of_losses(hidden, weight, labels)
    assert sum(kept) == hidden.numel() + weight.numel()


@pytest.mark.parametrize("num_ids", [1, 300, 399, 400])
def test_rows_that_only_pad_the_vocabulary_are_left_out(num_ids: int) -> None:
    hidden, weight, labels = _inputs(50, 400, 16)
    labels %= num_ids
    labels[::7] = IGNORED_LABEL
    total = sum_of_losses(hidden, weight, labels, num_ids)
    expected = _reference(hidden, weight[:num_ids], labels)
    torch.testing.assert_close(total, expected)
    found = torch.autograd.grad(total, (hidden, weight))
    for mine, theirs in zip(found, torch.autograd.grad(expected, (hidden, weight)), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert not found[1][num_ids:].any()


def test_a_label_of_a_row_that_is_no_id_is_not_learned() -> None:
    hidden, weight = torch.ones(2, 4, requires_grad=True), torch.eye(6, 4)
    total = sum_of_losses(hidden, weight, torch.tensor([1, 5]), 5)
    torch.testing.assert_close(total, sum_of_losses(hidden, weight, torch.tensor([1, IGNORED_LABEL]), 5))
