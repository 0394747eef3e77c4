from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.model import PRESETS, choose_architecture, memory_bytes, num_parameters, preset
from trainer.model.choice import memory_tier_bytes

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
