"""Which announcements a DHT node stores when there are more than it has room for."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.network.discovery.dht_quotas import RecordQuotas

_SIZE = 1000
_STORED = _SIZE + 128


class _Quotas(RecordQuotas):
    """With a clock that is set."""

    def __init__(self, *, max_records: int = 1000, per_key: int = 8) -> None:
        self.now = 1000.0
        clock = lambda: self.now  # noqa: E731
        super().__init__(
            max_records=max_records, max_bytes_per_key=per_key * _STORED, max_lifetime_s=600.0, clock=clock
        )


def test_a_flood_pushes_out_itself() -> None:
    quotas = _Quotas()
    quotas.admit(b"run", "honest", _SIZE, "127.0.0.1")
    quotas.now += 10.0
    quotas.admit(b"run", "honest", _SIZE, "127.0.0.1")
    for number in range(100):  # From the same host.
        quotas.now += 0.01
        dropped = quotas.admit(b"run", f"s{number}", _SIZE, "127.0.0.1")
        assert dropped == ([(b"run", f"s{number - 7}")] if number >= 7 else [])
    assert len(quotas) == 8
    assert quotas.admit(b"run", "newcomer", _SIZE, "127.0.0.1") == [(b"run", "s93")]
    assert quotas.admit(b"run", "elsewhere", _SIZE, "127.0.0.2") == [(b"run", "s94")]


def test_a_host_that_renews_its_flood_leaves_room_for_others() -> None:
    quotas = _Quotas()
    for _ in range(3):
        quotas.now += 10.0
        for number in range(8):
            quotas.admit(b"run", f"s{number}", _SIZE, "127.0.0.66")
    assert quotas.admit(b"run", "s8", _SIZE, "127.0.0.66") is None
    assert quotas.admit(b"run", "newcomer", _SIZE, "127.0.0.1") == [(b"run", "s0")]
    assert len(quotas) == 8


def test_a_run_that_fills_the_node_gives_way_to_others() -> None:
    quotas = _Quotas(max_records=10, per_key=100)
    for number in range(30):
        quotas.admit(b"attack", f"s{number}", _SIZE, f"198.51.100.{number}")
    for number in range(5):
        dropped = quotas.admit(b"run", f"h{number}", _SIZE, "127.0.0.1")
        assert dropped is not None
        assert [key for key, _ in dropped] == [b"attack"]
    assert len(quotas) == 10
    assert quotas.admit(b"attack", "s31", _SIZE, "198.51.100.31") != []


def test_what_is_too_long_or_too_old_goes() -> None:
    quotas = _Quotas()
    assert quotas.admit(b"run", "long", 9 * _SIZE, "h") is None
    quotas.admit(b"run", "a", _SIZE, "h")
    quotas.now += 599.0
    quotas.admit(b"run", "b", _SIZE, "h")
    assert quotas.overdue() == []
    quotas.now += 1.0
    assert quotas.overdue() == [(b"run", "a")]
    assert len(quotas) == 1


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from("kl"), st.integers(0, 11), st.sampled_from("ABC"), st.integers(1, 3 * _SIZE)),
        max_size=80,
    )
)
def test_whatever_is_filed_the_bounds_hold(steps: list[tuple[str, int, str, int]]) -> None:
    quotas = _Quotas(max_records=9, per_key=5)
    held: dict[tuple[bytes, str], tuple[int, str]] = {}
    for key_name, number, host, size in steps:
        quotas.now += 0.4
        place = (key_name.encode(), f"{number}")
        dropped = quotas.admit(*place, size, host)
        if dropped is None:
            assert len(quotas) == len(held)
            continue
        assert place not in dropped
        for gone in dropped:
            assert gone in held
            del held[gone]
        held[place] = (size + 128, held.get(place, (0, host))[1])
        by_key = Counter[bytes]()
        for (key, _), (size_bytes, _) in held.items():
            by_key[key] += size_bytes
        assert len(held) == len(quotas) <= 9
        assert max(by_key.values()) <= 5 * _STORED


_ROOT = Path(__file__).parents[4]
_STORAGE = """
from hivemind.dht.routing import DHTID
from hivemind.utils.timed_storage import get_dht_time
from trainer.network.discovery import dht_node
from trainer.network.discovery.dht_quotas import RecordQuotas

now = 1000.0
storage = dht_node.BoundedStorage(RecordQuotas(max_bytes_per_key=8 * 1128, max_lifetime_s=600.0, clock=lambda: now))
key, until = DHTID.generate("run"), get_dht_time() + 3600.0
for number in range(5000):
    now += 0.001
    assert storage.store(key, b"x" * 1000, until + number, subkey=f"s{number}")
records = storage.get(key).value
assert set(records.data) == {f"s{number}" for number in range(4992, 5000)}, records.data
assert not storage.store(key, b"x" * 1000, until, subkey="s4999")  # Older than what is there.
assert not storage.store(key, b"x", get_dht_time() - 1.0, subkey="late")
dht_node._SWEEP_INTERVAL_S = 0.0
now += 300.0
assert storage.store(key, b"y" * 1000, until + 9000, subkey="s4999")
assert len(records.expiration_heap) < 2000, len(records.expiration_heap)
now += 301.0
assert storage.store(key, b"z" * 1000, until, subkey="new")
assert {subkey: it.value[:1] for subkey, it in storage.get(key).value.items()} == {"s4999": b"y", "new": b"z"}
now += 601.0
other = DHTID.generate("other")
assert storage.store(other, b"x" * 1000, until, subkey="s")
assert list(storage.data) == [other]
print("held")
"""


@pytest.mark.slow
def test_hiveminds_storage_keeps_within_them() -> None:
    """In a process of its own, as in production: hivemind changes the logging of whoever imports it."""
    done = subprocess.run([sys.executable, "-c", _STORAGE], cwd=_ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "held\n", done.stderr
