"""Options are checked where they are made."""

from __future__ import annotations

import math

import pytest

from trainer.errors import TrainerUsageError
from trainer.network.rpc import Endpoint, Identity, RpcConfig
from trainer.network.rpc.config import split_address


@pytest.mark.parametrize(
    "options",
    [
        {"port": -1},
        {"port": 65536},
        {"heartbeat_s": 0.0},
        {"stall_timeout_s": math.nan},
        {"connect_timeout_s": -1.0},
        {"max_clock_skew_s": math.inf},
        {"stop_grace_s": -0.1},
        {"max_calls": 0},
        {"max_queued_bytes": 0},
        {"heartbeat_s": 6.0, "stall_timeout_s": 10.0},
        {"allowed_peers": ("me",)},
        {"public_address": "host:port"},
        {"public_address": "host:70000"},
    ],
)
def test_a_bad_option_is_named(options: dict[str, object]) -> None:
    name = "stall_timeout_s" if len(options) == 2 else next(iter(options))
    with pytest.raises(TrainerUsageError, match=rf"rpc\.{name}: expected .* found"):
        RpcConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("10.0.0.1:4100", "10.0.0.1", 4100),
        ("node.example:1", "node.example", 1),
        ("[2001:db8::1]:443", "2001:db8::1", 443),
    ],
)
def test_addresses(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "host:0", "host:65536", "host:1x", "2001:db8::1", "h:١"]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(TrainerUsageError, match="expected an address"):
        split_address(address)


@pytest.mark.parametrize(
    ("public", "host", "expected"),
    [
        ("203.0.113.7:99", "127.0.0.1", "203.0.113.7:99"),
        ("gpu.example", "127.0.0.1", "gpu.example:0"),
        ("[2001:db8::1]:99", "127.0.0.1", "[2001:db8::1]:99"),
        ("[2001:db8::1]", "127.0.0.1", "[2001:db8::1]:0"),
        ("", "10.1.2.3", "10.1.2.3:0"),
        ("", "::1", "[::1]:0"),
    ],
)
def test_the_address_others_are_told(public: str, host: str, expected: str) -> None:
    endpoint = Endpoint(Identity.create(), "run", RpcConfig(host=host, public_address=public))
    assert endpoint.address == expected


def test_listening_everywhere_gives_an_address_of_this_machine() -> None:
    host, _, _ = Endpoint(Identity.create(), "run", RpcConfig()).address.rpartition(":")
    assert host not in ("", "0.0.0.0", "::")


@pytest.mark.parametrize("run_id", ["", "r" * 129])
def test_a_run_has_a_name(run_id: str) -> None:
    with pytest.raises(TrainerUsageError, match="run_id"):
        Endpoint(Identity.create(), run_id, RpcConfig())
