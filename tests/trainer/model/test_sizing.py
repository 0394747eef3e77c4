from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.support.model_configs import small_config
from trainer.errors import TrainerUsageError
from trainer.model import (
    PRESETS,
    Transformer,
    available_memory_bytes,
    choose_architecture,
    flops_per_token,
    memory_bytes,
    num_parameters,
    preset,
    stage_ranges,
)
from trainer.model.config import ModelConfig
from trainer.model.sizing import memory_tier_bytes, num_embedding_parameters, stage_flops_per_token

_UNITS = {"m": 1e6, "b": 1e9}


def _counted(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(config).parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_parameters_their_names_say(name: str):
    config = preset(name, 32_000)
    counted = _counted(config)
    assert num_parameters(config) == counted
    assert memory_bytes(config) == 16 * counted == memory_bytes(config, bytes_per_parameter=32) // 2
    if name == "tiny":
        assert counted - num_embedding_parameters(config) == pytest.approx(1e6, rel=0.05)
    else:
        assert counted == pytest.approx(float(name[:-1]) * _UNITS[name[-1]], rel=0.05)


def test_presets_are_listed_smallest_first_and_the_largest_is_the_specified_one():
    sizes = [num_parameters(preset(name, 32_000)) for name in PRESETS]
    assert sizes == sorted(sizes)
    assert {preset(name, 512).vocab_size for name in PRESETS} == {512}
    with pytest.raises(TrainerUsageError, match="tiny, 15m"):
        preset("8b", 32_000)
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

    gpt2 = preset("125m", 50_304)
    assert flops_per_token(gpt2, 1024) == pytest.approx(6 * 114e6 + 12 * 12 * 768 * 1024, rel=0.01)


@given(
    shape=st.builds(
        small_config,
        num_layers=st.integers(2, 6),
        qk_norm=st.booleans(),
        reorder_norm=st.booleans(),
        tie_embeddings=st.booleans(),
    ),
    num_stages=st.integers(2, 6),
)
def test_the_flops_of_stages_add_up_to_the_models(shape: ModelConfig, num_stages: int):
    assume(num_stages <= shape.num_layers)
    ranges = stage_ranges(shape.num_layers, num_stages)
    each = [stage_flops_per_token(shape, layers, has_output=layers is ranges[-1], seq_len=16) for layers in ranges]
    assert sum(each) == flops_per_token(shape, 16)


_MB = 1_000_000
_MEMORY = st.integers(0, 400_000 * _MB)


@given(available=_MEMORY)
@example(available=6568 * _MB)  # Two readings of the specification, of one tier.
@example(available=6622 * _MB)
def test_what_is_chosen_fits_and_the_next_does_not_by_the_tier(available: int):
    chosen = choose_architecture(available, 32_768)
    assert chosen == choose_architecture(available // (500 * _MB) * 500 * _MB, 32_768)
    ladder = [preset(name, 32_768) for name in PRESETS]
    place = ladder.index(chosen)
    assert place == 0 or memory_bytes(chosen) <= 0.7 * available
    assert place + 1 == len(ladder) or memory_bytes(ladder[place + 1]) > 0.7 * memory_tier_bytes(available)


@pytest.mark.parametrize(
    ("available_mb", "name"),
    [(-1, "tiny"), (0, "tiny"), (499, "tiny"), (8_000, "250m"), (24_000, "1b"), (80_000, "3b"), (180_000, "7.5b")],
)
def test_sizes_for_usual_memories(available_mb: int, name: str):
    assert choose_architecture(available_mb * _MB, 32_768) == preset(name, 32_768)


_MEMINFO = "MemTotal: 16000000 kB\nMemAvailable:    8000000 kB\nHugePages_Total: 0\n"
_LIMITS = "Limit   Soft Limit   Hard Limit   Units\nMax address space   3000000000   unlimited   bytes\n"


def _group(path: str, limit: int | str, used: int, cache: int = 0) -> dict[str, str]:
    return {
        f"cgroup/{path}/memory.max": f"{limit}\n",
        f"cgroup/{path}/memory.current": f"{used}\n",
        f"cgroup/{path}/memory.stat": f"anon 5\ninactive_file {cache}\n",
    }


def _old_group(path: str, limit: int, used: int, cache: int = 0) -> dict[str, str]:
    return {
        f"cgroup/memory/{path}/memory.limit_in_bytes": f"{limit}\n",
        f"cgroup/memory/{path}/memory.usage_in_bytes": f"{used}\n",
        f"cgroup/memory/{path}/memory.stat": f"total_inactive_file {cache}\n",
    }


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 8_000_000 * 1024),  # Without limits: what the machine has.
        # A group's limit without idle page cache; above its limit nothing is left.
        ({"proc/self/cgroup": "0::/job\n"} | _group("job", 4000 * _MB, 1000 * _MB, cache=300 * _MB), 3300 * _MB),
        ({"proc/self/cgroup": "0::/job\n"} | _group("job", 100 * _MB, 150 * _MB), 0),
        (  # The tightest of nested groups.
            {"proc/self/cgroup": "0::/slice/job\n"}
            | _group("slice", 2000 * _MB, 500 * _MB)
            | _group("slice/job", "max", 200 * _MB),
            1500 * _MB,
        ),
        # In a container the group is the mount itself.
        ({"proc/self/cgroup": "0::/kubepods/pod1/container\n"} | _group(".", 1000 * _MB, 100 * _MB), 900 * _MB),
        (  # Version 1, whose unlimited number is no limit.
            {"proc/self/cgroup": "9:cpu:/x\n4:hugetlb,memory:/job\n0::/\n"}
            | _old_group("", 9_223_372_036_854_771_712, 5 * _MB)
            | _old_group("job", 700 * _MB, 100 * _MB, cache=20 * _MB),
            620 * _MB,
        ),
        # The process's own limit.
        ({"proc/self/limits": _LIMITS, "proc/self/status": "VmSize:\t  1000000 kB\n"}, 3 * 10**9 - 1_000_000 * 1024),
    ],
)
def test_the_least_that_any_limit_leaves_is_available(files: Mapping[str, str], available: int, tmp_path: Path):
    """Of a procfs and a mount of control groups in a folder."""
    (tmp_path / "cgroup").mkdir()
    for name, text in {"proc/meminfo": _MEMINFO, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_memory_bytes(proc=tmp_path / "proc", cgroups=tmp_path / "cgroup") == available


def test_this_machine_has_memory_and_no_reading_at_all_is_an_error(tmp_path: Path):
    assert 100 * _MB < available_memory_bytes() < 1 << 50
    with pytest.raises(TrainerUsageError, match="--preset"):
        available_memory_bytes(proc=tmp_path / "none", cgroups=tmp_path / "none")
