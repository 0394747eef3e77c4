"""Options out of range are refused by name."""

from __future__ import annotations

import pytest

from trainer.discovery.config import DiscoveryConfig
from trainer.discovery.dht import listen_address
from trainer.errors import DiscoveryError, TrainerUsageError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("announce_interval_s", 0.0),
        ("poll_interval_s", float("nan")),
        ("announcement_lifetime_s", 4000.0),
        ("announcement_lifetime_s", 9.0),
        ("max_peers", 0),
        ("dht_port", 70_000),
        ("initial_peers", ("10.0.0.1:1", "/ip4/10.0.0.1/tcp/1/p2p/Qm")),
    ],
)
def test_a_value_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(TrainerUsageError, match=name):
        DiscoveryConfig(**{name: value})  # type: ignore[arg-type]


def test_the_form_of_the_addresses_says_which_kind() -> None:
    assert DiscoveryConfig(initial_peers=("/ip4/10.0.0.1/tcp/1/p2p/Qm",)).uses_dht
    assert not DiscoveryConfig(initial_peers=("10.0.0.1:1",)).uses_dht
    assert not DiscoveryConfig().uses_dht


def test_multiaddresses() -> None:
    assert listen_address("127.0.0.1", 7) == "/ip4/127.0.0.1/tcp/7"
    assert listen_address("::1", 7) == "/ip6/::1/tcp/7"
    with pytest.raises(DiscoveryError, match="IP address"):
        listen_address("localhost", 7)
