"""Memory does not grow with the corpus: sixty shards peak where six do."""

import threading

import psutil
import pytest

from tests.support.documents import documents, write_json_lines
from tests.support.populating import populate_arguments, start


def peak_bytes(arguments):
    """The most that a populate and its workers had in memory together."""
    process = start(*arguments)
    peak, ended = 0, threading.Event()

    def watch():
        nonlocal peak
        while not ended.wait(0.02):
            try:
                members = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
                peak = max(peak, sum(member.memory_info().rss for member in members))
            except psutil.NoSuchProcess:
                continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        _, errors = process.communicate(timeout=100)
    finally:
        ended.set()
        watcher.join()
    assert process.returncode == 0, errors
    return peak


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_sixty_shards_take_the_memory_of_six(tmp_path):
    path = write_json_lines(tmp_path / "long.jsonl", documents(seed=13, count=1500) * 120)
    arguments = [*populate_arguments(tmp_path / "store", path, shard_tokens=500_000), "--workers", "1"]
    few = peak_bytes([*arguments, "--max-shards", "6"])
    many = peak_bytes([*arguments, "--max-shards", "66"])
    assert len(list((tmp_path / "store").glob("shard_*.pt"))) > 60
    assert many < 1.10 * few
    assert many < 1e9
