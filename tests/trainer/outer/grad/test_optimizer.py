"""AdamW and clipping over flat vectors: torch's numbers, and the same bits however they are computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils import clip_grad_norm_

from tests.support.replica_group import Regression
from trainer.errors import TrainerUsageError
from trainer.inner import InnerConfig, make_optimizer
from trainer.outer.diloco import FlatLayout, synchronised_parameters
from trainer.outer.grad.optimizer import ExactAdamW, clip_coefficient, exact_norm

INNER = InnerConfig(lr=3e-3, weight_decay=0.1)


@pytest.mark.parametrize("max_norm", [0.05, 1e9], ids=["clipped", "not clipped"])
def test_it_is_torchs_adamw(max_norm: float) -> None:
    model, flat = Regression(0), Regression(0)
    optimizer = make_optimizer(model, INNER)
    parameters = synchronised_parameters(flat)
    layout = FlatLayout.of(parameters)
    weights = layout.gather(parameters)
    moments = torch.zeros_like(weights), torch.zeros_like(weights)
    adamw = ExactAdamW.of(make_optimizer(flat, INNER), parameters, layout)
    assert {decay for _, decay in adamw.decays} == {0.0, 0.1}
    for update in range(1, 21):
        for each, step in ((model, update), (flat, update)):
            each.zero_grad()
            each(step).backward()
        gradient = layout.gather({name: parameter.grad for name, parameter in parameters.items()})
        norm = float(clip_grad_norm_(model.parameters(), max_norm))
        optimizer.step()
        assert exact_norm(gradient) == pytest.approx(norm, rel=1e-4)
        scale = clip_coefficient(exact_norm(gradient), max_norm)
        adamw.step(weights, *moments, gradient, scale=scale, lr=INNER.lr, update=update)
        layout.scatter(weights, parameters)
        torch.testing.assert_close(weights, layout.gather(synchronised_parameters(model)), rtol=1e-5, atol=1e-6)


@given(st.integers(1, 3000), st.integers(0, 10))
def test_a_step_has_the_same_bits_in_other_blocks_and_with_other_threads(num_values: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    vectors = [torch.randn(num_values, generator=generator) for _ in range(3)]
    second, runs = torch.rand(num_values, generator=generator), (slice(0, num_values), 0.1)
    whole = [vector.clone() for vector in vectors]
    ExactAdamW((0.9, 0.95), 1e-8, (runs,)).step(
        whole[0], whole[1], after := second.clone(), whole[2], scale=0.3, lr=1e-3, update=7
    )
    cut = num_values // 3
    pieces = tuple((each, 0.1) for each in (slice(0, cut), slice(cut, num_values)) if each.stop > each.start)
    parts, after_parts = [vector.clone() for vector in vectors], second.clone()
    ExactAdamW((0.9, 0.95), 1e-8, pieces).step(parts[0], parts[1], after_parts, parts[2], scale=0.3, lr=1e-3, update=7)
    assert all(torch.equal(one, other) for one, other in zip([*whole, after], [*parts, after_parts], strict=True))


@pytest.mark.parametrize("num_values", [1, 2, 3, 1000, (1 << 18) - 1, (1 << 18) + 5])
def test_norms(num_values: int) -> None:
    vector = torch.randn(num_values, generator=torch.Generator().manual_seed(num_values))
    threads = torch.get_num_threads()
    norm = exact_norm(vector)
    assert norm == pytest.approx(float(vector.double().norm()), rel=1e-12)
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert exact_norm(vector) == norm
    finally:
        torch.set_num_threads(threads)
    assert exact_norm(torch.full((5,), 1e38)) == pytest.approx(1e38 * 5**0.5, rel=1e-6), "squares are in fp64"


def test_another_optimizer_is_refused() -> None:
    model = Regression(0)
    parameters = synchronised_parameters(model)
    layout, weights = FlatLayout.of(parameters), list(parameters.values())
    for wrong in (
        torch.optim.SGD(weights, lr=1e-3),
        torch.optim.AdamW(weights, amsgrad=True),
        torch.optim.AdamW(weights[1:]),
        torch.optim.AdamW([{"params": weights[:1], "eps": 1e-6}, {"params": weights[1:]}]),
    ):
        with pytest.raises(TrainerUsageError, match="AdamW"):
            ExactAdamW.of(wrong, parameters, layout)
