"""Options out of range are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.errors import DiscoveryError, TrainerUsageError
from trainer.network.discovery.config import DiscoveryConfig
from trainer.network.discovery.dht import SeedConfig, listen_address

_ID = "12D3KooWGm9bJVTBVuZrZ3EXuGJEBWVTcKpWUWRjxEGbWwsXQW41"
_RSA_ID = "QmNLei78zWmzUdbeRB3CiUfAizWUrbeeZh5K1rhAQKCh51"
_SEED = f"/ip4/10.0.0.1/tcp/1/p2p/{_ID}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("announce_interval_s", 0.0),
        ("poll_interval_s", float("nan")),
        ("announcement_lifetime_s", 4000.0),
        ("announcement_lifetime_s", 9.0),
        ("max_peers", 0),
        ("dht_port", 70_000),
        ("initial_peers", ("10.0.0.1:1", _SEED)),
    ],
)
def test_a_value_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(TrainerUsageError, match=name):
        DiscoveryConfig(**{name: value})  # type: ignore[arg-type]


def test_multiaddresses() -> None:
    assert [DiscoveryConfig(initial_peers=peers).uses_dht for peers in ((_SEED,), ("10.0.0.1:1",), ())] == [
        True,
        False,
        False,
    ]
    assert listen_address("127.0.0.1", 7) == "/ip4/127.0.0.1/tcp/7"
    assert listen_address("::1", 7) == "/ip6/::1/tcp/7"
    with pytest.raises(DiscoveryError, match="IP address"):
        listen_address("localhost", 7)


@pytest.mark.parametrize(
    "address",
    [
        *("10.0.0.1:4100", "gpu-7.example.org:4100", "gpu_7:1", "[2001:db8::1]:4100", "localhost:65535"),
        *(_SEED, f"/ip6/::1/tcp/4001/p2p/{_RSA_ID}", f"/dns4/seed.example.org/tcp/4001/p2p/{_ID}"),
        f"/ip4/10.0.0.1/udp/4001/quic-v1/p2p/{_ID}",
    ],
)
def test_an_address_that_can_be_dialled_is_taken(address: str) -> None:
    assert DiscoveryConfig(initial_peers=(address,)).initial_peers == (address,)


@pytest.mark.parametrize(
    "address",
    [
        *("", "foo", "10.0.0.1", "10.0.0.1:", ":4100", "10.0.0.1:0", "10.0.0.1:65536", "http://10.0.0.1:80", "a b:1"),
        *("10.0.0.1:4100,10.0.0.2:4100", "10.0.0.1:4100/p2p", "2001:db8::1:4100", "[10.0.0.1]x:4100"),
        *("/", "/ip4/127.0.0.1/tcp/24001", f"/ip4/127.0.0.1/p2p/{_ID}", f"/ip4/1270.0.1/tcp/1/p2p/{_ID}"),
        *(f"/ip4/10.0.0.1/tcp/0/p2p/{_ID}", f"/ip4/::1/tcp/1/p2p/{_ID}", f"/dns4/a b/tcp/1/p2p/{_ID}"),
        *(f"{_SEED[:-2]}", f"{_SEED}/", f"{_SEED}x", f"{_SEED} ", f"{_SEED},{_SEED}", f"{_SEED[:-1]}0"),
        *("/ip4/10.0.0.1/tcp/1/p2p/", "/ip4/10.0.0.1/tcp/1/p2p/Qm", f"/ip4/10.0.0.1/tcp/1/p2p/{_RSA_ID[:-1]}"),
    ],
)
def test_an_address_that_nobody_could_dial_is_refused_in_one_line(address: str) -> None:
    with pytest.raises(TrainerUsageError, match=r"^initial_peers: expected .*, found ") as refusal:
        DiscoveryConfig(initial_peers=(address,))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(
            ({"initial_peers": (it,)}, "an address of a seed")
            for it in ("10.0.0.1:4001", "/ip4/10.0.0.1/tcp/4001", "foo")
        ),
        ({"port": 70_000}, "port"),
        ({"port": 0, "public_host": "203.0.113.1"}, "public_host"),
    ],
)
def test_a_seed_begins_at_seeds_and_is_reached_at_one_port(options: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainerUsageError, match=said):
        SeedConfig(**options)
