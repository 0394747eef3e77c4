from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.model_configs import small_config
from trainer.errors import TrainerUsageError
from trainer.model import (
    PRESETS,
    Transformer,
    choose_architecture,
    flops_per_token,
    memory_bytes,
    num_parameters,
    preset,
)
from trainer.model.config import ModelConfig
from trainer.model.sizing import memory_tier_bytes, num_embedding_parameters

_UNITS = {"m": 1e6, "b": 1e9}


def _counted(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(config).parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_parameters_their_names_say(name: str):
    config = preset(name, 32_000)
    counted = _counted(config)
    assert num_parameters(config) == counted
    if name == "tiny":
        assert counted - num_embedding_parameters(config) == pytest.approx(1e6, rel=0.05)
    else:
        assert counted == pytest.approx(float(name[:-1]) * _UNITS[name[-1]], rel=0.05)


def test_presets_are_listed_smallest_first_and_take_the_vocabulary_asked_for():
    sizes = [num_parameters(preset(name, 32_000)) for name in PRESETS]
    assert sizes == sorted(sizes)
    assert {preset(name, 512).vocab_size for name in PRESETS} == {512}
    with pytest.raises(TrainerUsageError, match="tiny, 15m"):
        preset("8b", 32_000)


def test_the_largest_preset_is_the_specified_one():
    config = preset("7.5b", 32_000)
    one_layer = (num_parameters(config) - num_embedding_parameters(config)) / config.num_layers
    assert one_layer == pytest.approx(218.1e6, rel=1e-3)
    assert (config.qk_norm, config.reorder_norm, config.num_kv_heads, config.rope_theta) == (True, True, 8, 5e5)


@pytest.mark.slow
@given(
    shape=st.builds(
        small_config,
        vocab_size=st.integers(1, 300),
        num_layers=st.integers(1, 5),
        num_kv_heads=st.sampled_from([1, 2, 4]),
        ffn_dim=st.integers(1, 50),
        qk_norm=st.booleans(),
        reorder_norm=st.booleans(),
        tie_embeddings=st.booleans(),
    )
)
def test_counting_by_arithmetic_is_counting(shape: ModelConfig):
    assert num_parameters(shape) == _counted(shape)


def test_flops_count_multiplications_only():
    config = small_config()
    matrices = num_parameters(config) - config.vocab_size * config.dim
    assert flops_per_token(config, 8) == 6 * matrices + 12 * 4 * 16 * 8
    tied = small_config(tie_embeddings=True)
    assert flops_per_token(tied, 8) == flops_per_token(config, 8), "a tied output matrix is multiplied all the same"


def test_a_gpt2_sized_model_takes_the_usual_flops():
    config = preset("125m", 50_304)
    assert flops_per_token(config, 1024) == pytest.approx(6 * 114e6 + 12 * 12 * 768 * 1024, rel=0.01)


def test_training_state_takes_sixteen_bytes_a_parameter():
    config = preset("1b", 32_000)
    assert memory_bytes(config) == 16 * num_parameters(config)
    assert memory_bytes(config, bytes_per_parameter=32) == 2 * memory_bytes(config)


_MB = 1_000_000
_MEMORY = st.integers(0, 400_000 * _MB)


def test_the_two_readings_of_the_specification_give_one_architecture():
    assert memory_tier_bytes(6568 * _MB) == memory_tier_bytes(6622 * _MB) == 6500 * _MB
    assert choose_architecture(6568 * _MB, 32_768) == choose_architecture(6622 * _MB, 32_768)


@pytest.mark.slow
@given(available=_MEMORY)
def test_the_choice_depends_on_the_tier_only(available: int):
    assert choose_architecture(available, 32_768) == choose_architecture(memory_tier_bytes(available), 32_768)


@pytest.mark.slow
@given(
    less=_MEMORY, more=_MEMORY, vocab_size=st.sampled_from([266, 32_768, 10_000_384]), each=st.sampled_from([16, 32])
)
def test_more_memory_never_gives_a_smaller_model(less: int, more: int, vocab_size: int, each: int):
    less, more = sorted((less, more))
    smaller = choose_architecture(less, vocab_size, bytes_per_parameter=each)
    larger = choose_architecture(more, vocab_size, bytes_per_parameter=each)
    assert num_parameters(smaller) <= num_parameters(larger)


@given(available=_MEMORY)
def test_what_is_chosen_fits_and_the_next_does_not(available: int):
    chosen = choose_architecture(available, 32_768)
    ladder = [preset(name, 32_768) for name in PRESETS]
    place = ladder.index(chosen)
    assert place == 0 or memory_bytes(chosen) <= 0.7 * available
    assert place + 1 == len(ladder) or memory_bytes(ladder[place + 1]) > 0.7 * memory_tier_bytes(available)


@pytest.mark.parametrize(
    ("available_mb", "name"),
    [(0, "tiny"), (499, "tiny"), (8_000, "250m"), (24_000, "1b"), (80_000, "3b"), (180_000, "7.5b")],
)
def test_sizes_for_usual_memories(available_mb: int, name: str):
    assert choose_architecture(available_mb * _MB, 32_768) == preset(name, 32_768)


def test_memory_below_nothing_is_the_smallest():
    assert choose_architecture(-5, 32_768) == preset("tiny", 32_768)
