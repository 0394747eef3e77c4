"""Compilation by regions: one code for all blocks, and none again at a last batch, an outer step, or more ids.

What is compiled, and how often, is decided before a backend sees it: with the one that only replays a graph, counting
takes seconds instead of the minutes in which inductor calls a C++ compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.support.model_configs import SMALL, batches
from tests.support.sharing_ranks import one_rank, ranked_loop, short_batches
from trainer.evaluation import HeldOut
from trainer.inner import InnerConfig, InnerLoop, make_optimizer
from trainer.inner.rank_place import RankPlace
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
        for _ in range(3):
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


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["off", "selective", "full"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_blocks_in_shards_are_compiled_as_whole_ones_are(checkpointing):
    """What FSDP hangs onto a block cannot be compiled: what encloses it would run operator by operator."""
    found = []
    for kind in ("ddp", "fsdp"):
        torch._dynamo.reset()
        counters.clear()
        config = _config("on", checkpointing)
        with one_rank():
            inner, _ = ranked_loop(kind, RankPlace(), config, short_batches((ROWS, ROWS - 1, 1)), rows=ROWS)
            losses = [inner.step().loss]
            graphs, operators = _num_graphs(), counters["stats"]["calls_captured"]
            losses += [inner.step().loss for _ in range(5)]
        assert _num_graphs() == graphs, f"compiled again: {dict(counters['recompiles'])}"
        found.append((graphs, operators, losses))
    (graphs, operators, losses), (graphs_in_shards, operators_in_shards, losses_in_shards) = found
    assert graphs == graphs_in_shards == 2
    assert operators == operators_in_shards
    assert losses_in_shards == pytest.approx(losses, rel=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_a_rank_sees_batches_of_its_own_rows_and_never_another_shape():
    """Of six rows the second of four ranks has two; of three it has one, and of one none."""
    with one_rank():
        config = replace(_config("on", "off"), micro_batch_size=6)
        inner, model = ranked_loop("ddp", RankPlace(1, 4, 1, 4), config, short_batches((6, 3, 1)), rows=6)
        seen: list[torch.Size] = []
        model.get_submodule("embedding").register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
        for _ in range(6):
            inner.step()
    assert set(seen) == {(2, 8)}
    assert _num_graphs() == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_evaluation_compiles_once_what_runs_without_gradients():
    config = _config("on", "off")
    model = build_model(SMALL, 0)
    inner = InnerLoop(model, make_optimizer(model, config), config, _epochs(), CPU)
    inner.step()
    ids = torch.randint(0, SMALL.vocab_size, (3 * ROWS + 1, 8))
    held_out = HeldOut({"a": (ids, ids)}, torch.ones(SMALL.vocab_size, dtype=torch.int64))
    trained = _num_graphs()
    first = held_out.measure(model, CPU, rows=ROWS)
    measured = _num_graphs()
    assert measured <= trained + 2, "a block and a chunk of logits"
    assert first.whole.num_tokens == ids.numel()
    for _ in range(2):
        inner.step()
        held_out.measure(model, CPU, rows=ROWS)
    assert _num_graphs() == measured, f"compiled again: {dict(counters['recompiles'])}"
