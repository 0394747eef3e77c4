from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from trainer.errors import TrainerUsageError
from trainer.model import available_memory_bytes

_MB = 1_000_000
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
        pytest.param({}, 8_000_000 * 1024, id="without limits: what the machine has"),
        pytest.param(
            {"proc/self/cgroup": "0::/job\n"} | _group("job", 4000 * _MB, 1000 * _MB, cache=300 * _MB),
            3300 * _MB,
            id="a group's limit without idle page cache",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/slice/job\n"}
            | _group("slice", 2000 * _MB, 500 * _MB)
            | _group("slice/job", "max", 200 * _MB),
            1500 * _MB,
            id="the tightest of nested groups",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/kubepods/pod1/container\n"} | _group(".", 1000 * _MB, 100 * _MB),
            900 * _MB,
            id="in a container the group is the mount itself",
        ),
        pytest.param(
            {"proc/self/cgroup": "9:cpu:/x\n4:hugetlb,memory:/job\n0::/\n"}
            | _old_group("", 9_223_372_036_854_771_712, 5 * _MB)
            | _old_group("job", 700 * _MB, 100 * _MB, cache=20 * _MB),
            620 * _MB,
            id="version 1, whose unlimited number is no limit",
        ),
        pytest.param(
            {"proc/self/limits": _LIMITS, "proc/self/status": "Name:\tpython\nVmSize:\t  1000000 kB\n"},
            3_000_000_000 - 1_000_000 * 1024,
            id="the process's own limit",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/job\n"} | _group("job", 100 * _MB, 150 * _MB),
            0,
            id="above its limit nothing is left",
        ),
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


def test_no_reading_at_all_is_an_error_that_says_what_to_do(tmp_path: Path):
    with pytest.raises(TrainerUsageError, match="--preset"):
        available_memory_bytes(proc=tmp_path / "none", cgroups=tmp_path / "none")


def test_this_machine_has_memory():
    assert 100 * _MB < available_memory_bytes() < 1 << 50
