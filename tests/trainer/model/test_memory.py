from __future__ import annotations

from pathlib import Path

import pytest

from trainer.errors import TrainerUsageError
from trainer.model import available_memory_bytes

_MB = 1_000_000


class Machine:
    """A procfs and a mount of control groups in a folder."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.cgroups = folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroups.mkdir()
        self.write(self.proc / "meminfo", "MemTotal: 16000000 kB\nMemAvailable:    8000000 kB\nHugePages_Total: 0\n")

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def belongs_to(self, *lines: str) -> None:
        self.write(self.proc / "self/cgroup", "\n".join(lines) + "\n")

    def group(self, path: str, limit: str, used: int, cache: int = 0) -> None:
        folder = self.cgroups / path
        self.write(folder / "memory.max", f"{limit}\n")
        self.write(folder / "memory.current", f"{used}\n")
        self.write(folder / "memory.stat", f"anon 5\ninactive_file {cache}\n")

    def old_group(self, path: str, limit: int, used: int, cache: int = 0) -> None:
        folder = self.cgroups / "memory" / path
        self.write(folder / "memory.limit_in_bytes", f"{limit}\n")
        self.write(folder / "memory.usage_in_bytes", f"{used}\n")
        self.write(folder / "memory.stat", f"total_inactive_file {cache}\n")

    def available(self) -> int:
        return available_memory_bytes(proc=self.proc, cgroups=self.cgroups)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_limits_it_is_what_the_machine_has_available(machine: Machine):
    assert machine.available() == 8_000_000 * 1024


def test_the_groups_limit_counts_without_idle_page_cache(machine: Machine):
    machine.belongs_to("0::/job")
    machine.group("job", str(4000 * _MB), used=1000 * _MB, cache=300 * _MB)
    assert machine.available() == 3300 * _MB


def test_the_tightest_of_nested_groups_counts(machine: Machine):
    machine.belongs_to("0::/slice/job")
    machine.group("slice", str(2000 * _MB), used=500 * _MB)
    machine.group("slice/job", "max", used=200 * _MB)
    assert machine.available() == 1500 * _MB


def test_in_a_container_the_group_is_the_mount_itself(machine: Machine):
    machine.belongs_to("0::/kubepods/pod1/container")
    machine.group(".", str(1000 * _MB), used=100 * _MB)
    assert machine.available() == 900 * _MB


def test_version_one_groups_count_and_their_unlimited_number_does_not(machine: Machine):
    machine.belongs_to("9:cpu:/x", "4:hugetlb,memory:/job", "0::/")
    machine.old_group("", 9_223_372_036_854_771_712, used=5 * _MB)
    machine.old_group("job", 700 * _MB, used=100 * _MB, cache=20 * _MB)
    assert machine.available() == 620 * _MB


def test_the_process_own_limit_counts(machine: Machine):
    machine.write(
        machine.proc / "self/limits",
        "Limit   Soft Limit   Hard Limit   Units\nMax address space   3000000000   unlimited   bytes\n",
    )
    machine.write(machine.proc / "self/status", "Name:\tpython\nVmSize:\t  1000000 kB\n")
    assert machine.available() == 3_000_000_000 - 1_000_000 * 1024


def test_a_process_above_its_limit_has_nothing_left(machine: Machine):
    machine.belongs_to("0::/job")
    machine.group("job", str(100 * _MB), used=150 * _MB)
    assert machine.available() == 0


def test_no_reading_at_all_is_an_error_that_says_what_to_do(tmp_path: Path):
    with pytest.raises(TrainerUsageError, match="--preset"):
        available_memory_bytes(proc=tmp_path / "none", cgroups=tmp_path / "none")


def test_this_machine_has_memory():
    assert 100 * _MB < available_memory_bytes() < 1 << 50
