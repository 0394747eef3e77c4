"""Compilation by regions: one code for all blocks, and none again at a last batch, an outer step, or more ids.

What is compiled, and how often, is decided before a backend sees it: with the one that only replays a graph, counting
takes seconds instead of the minutes in which inductor calls a C++ compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.support.model_configs import SMALL, batches
from trainer.inner import InnerConfig, InnerLoop, make_optimizer
from trainer.model import build_model, grow_vocabulary, limit_ids
from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer
from trainer.outer.engine.collective import LocalCollective

pytestmark = pytest.mark.timeout(300)

CPU = torch.device("cpu")
ROWS = 4


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def _epochs() -> Iterator[dict[str, Tensor]]:
    """Every third batch is the last of an epoch, of one row fewer or of one row."""
    for number, batch in enumerate(batches(1, num_rows=ROWS)):
        keep = {2: 3, 5: 1}.get(number % 6, ROWS)
        yield {name: ids[:keep] for name, ids in batch.items()}


def _config(compile_: str, checkpointing: str) -> InnerConfig:
    return InnerConfig(
        compile=compile_,  # type: ignore[arg-type]
        micro_batch_size=ROWS,
        lr=1e-2,
        warmup_steps=2,
        decay_end_step=100,
        activation_checkpointing=checkpointing,  # type: ignore[arg-type]
    )


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["off", "selective", "full"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_all_is_compiled_at_the_first_step_and_never_again(checkpointing):
    shape = replace(SMALL, num_layers=6)
    losses: list[list[float]] = []
    for setting in ("off", "on"):
        config = _config(setting, checkpointing)
        model = build_model(shape, 0, activation_checkpointing=config.activation_checkpointing)
        limit_ids(model, 60)
        inner = InnerLoop(model, make_optimizer(model, config), config, _epochs(), CPU)
        diloco = DiLoCoTrainer(model, DiLoCoConfig(inner_steps=4), LocalCollective())
        losses.append([inner.step().loss])
        diloco.after_inner_step()
        compiled, committed = _num_graphs(), 0
        assert (compiled > 0) == (setting == "on")
        for _ in range(11):
            losses[-1].append(inner.step().loss)
            outcome = diloco.after_inner_step()
            committed += outcome is not None and outcome.committed
        assert committed == 3
        assert _num_graphs() == compiled, f"compiled again: {dict(counters['recompiles'])}"
    # One for all blocks, and one for a chunk of logits; the loss's sum is no region.
    assert compiled == 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_more_layers_compile_no_more_and_a_grown_vocabulary_no_block():
    found = []
    for num_layers in (1, 6):
        torch._dynamo.reset()
        counters.clear()
        config = _config("on", "off")
        model = build_model(replace(SMALL, num_layers=num_layers), 0)
        inner = InnerLoop(model, make_optimizer(model, config), config, _epochs(), CPU)
        for _ in islice(range(3), 3):
            inner.step()
        found.append(_num_graphs())
    assert found[0] == found[1] == 2
    grow_vocabulary(model, 128, 0)
    limit_ids(model, 100)
    optimizer = make_optimizer(model, config)
    inner = InnerLoop(model, optimizer, config, _epochs(), CPU)
    for _ in range(3):
        assert not inner.step().skipped
    assert _num_graphs() <= 3, "only the chunk of logits has another width"
