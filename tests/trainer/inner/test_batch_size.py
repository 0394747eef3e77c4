"""The rule for the batch size in consistent units (spec T-8)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import TrainerUsageError
from trainer.inner import batch_size_for
from trainer.inner.config import activation_bytes
from trainer.model import ModelConfig, build_model, num_parameters, preset

GIB = 1 << 30
TINY = preset("tiny", 32_000)


def test_a_typical_node_reaches_the_upper_end() -> None:
    assert batch_size_for(4 * GIB, TINY, 512) == 8
    assert batch_size_for(1 << 50, preset("7.5b", 32_000), 4096) == 8


@pytest.mark.parametrize("memory_bytes", [1, 10**6, 16 * num_parameters(TINY)])
def test_a_model_that_hardly_fits_or_does_not_gets_one_row(memory_bytes: int) -> None:
    assert batch_size_for(memory_bytes, TINY, 512) == 1


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_with_checkpointed_activations_it_is_the_rule_of_the_specification(rows: int) -> None:
    row_bytes = 512 * TINY.dim * TINY.num_layers * 8
    enough = 16 * num_parameters(TINY) + int(rows * row_bytes / 0.3) + 4
    assert batch_size_for(enough, TINY, 512, activation_checkpointing=True) == rows
    assert batch_size_for(enough - 1000, TINY, 512, activation_checkpointing=True) == max(1, rows - 1)


@given(
    memory_bytes=st.integers(1, 1 << 42),
    more_bytes=st.integers(0, 1 << 40),
    seq_len=st.integers(1, 1 << 16),
    checkpointing=st.booleans(),
)
def test_it_is_whole_within_bounds_and_grows_with_memory(
    memory_bytes: int, more_bytes: int, seq_len: int, checkpointing: bool
) -> None:
    rows = batch_size_for(memory_bytes, TINY, seq_len, activation_checkpointing=checkpointing)
    more = batch_size_for(memory_bytes + more_bytes, TINY, seq_len, activation_checkpointing=checkpointing)
    assert isinstance(rows, int)
    assert 1 <= rows <= more <= 8


def test_a_length_or_a_memory_below_one_is_refused() -> None:
    for memory_bytes, seq_len in ((0, 512), (GIB, 0)):
        with pytest.raises(TrainerUsageError, match="1 or more"):
            batch_size_for(memory_bytes, TINY, seq_len)


@pytest.mark.parametrize("shape", [replace(TINY, vocab_size=1024), preset("30m", 1024)])
def test_what_the_blocks_keep_is_what_is_counted_on(shape: ModelConfig) -> None:
    model = build_model(shape, seed=0)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    ids = torch.zeros(1, 256, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, ids)
    output_bytes = shape.vocab_size * shape.dim * 4
    total = sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in parameters) - output_bytes
    assert total / (256 * shape.num_layers) == pytest.approx(activation_bytes(shape), rel=0.05)
