"""Options and addresses; where an endpoint connects when addresses come from strangers, and how often."""

from __future__ import annotations

import asyncio
import math
import socket
from typing import Any

import pytest

from tests.support.rpc_node import Clock
from trainer.errors import TrainerUsageError
from trainer.network.rpc import Endpoint, Identity
from trainer.network.rpc.config import RpcConfig, split_address
from trainer.network.rpc.connections import group_of_grpc_peer
from trainer.network.rpc.dialing import Dialing, DialRefusedError, address_group, host_kind, is_private_host
from trainer.network.rpc.messages import Peer

_OWN = "f" * 64


def _dialing(
    *named: str, allow_private: bool = False, port: int = 4100, clock: Clock | None = None, **config: Any
) -> Dialing:
    rpc = RpcConfig(**({"host": "8.8.8.8"} | config))
    dialing = Dialing(rpc, _OWN, clock or Clock())
    dialing.guard(named, allow_private=allow_private)
    dialing.listening_at(f"{rpc.host if rpc.host != '0.0.0.0' else '192.168.1.5'}:{port}", port)
    return dialing


def _admit(dialing: Dialing, address: str, peer_id: str = "a" * 64) -> tuple[tuple[str, int], ...]:
    return asyncio.run(dialing.admit(Peer(peer_id, address)))


def _refusal(dialing: Dialing, address: str) -> str:
    with pytest.raises(DialRefusedError) as caught:
        _admit(dialing, address)
    return caught.value.reason


def test_what_counts_as_one_host_here_and_as_grpc_names_it() -> None:
    groups = {
        "203.0.113.7": "203.0.113.7",
        "[2001:db8:1:2:3::4]": "2001:db8:1:2::/64",
        "2001:db8:1:2:ffff::": "2001:db8:1:2::/64",
        "::ffff:203.0.113.7": "203.0.113.7",
        "fe80::1%eth0": "fe80::/64",
        "Node.Example": "node.example",
    }
    assert {host: address_group(host) for host in groups} == groups
    groups = {
        "ipv4:127.0.0.1:5000": "127.0.0.1",
        "ipv6:%5B2001:db8::1%5D:5000": "2001:db8::/64",
        "ipv6:[::1]:5000": "::/64",
        "unix:/tmp/socket": "unix:/tmp/socket",
    }
    assert {peer: group_of_grpc_peer(peer) for peer in groups} == groups


@pytest.mark.parametrize(
    ("kind", "hosts"),
    [
        ("public", ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8")),
        ("loopback", ("127.0.0.1", "127.8.9.1", "[::1]", "::ffff:127.0.0.1")),
        ("private", ("10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "fd00::1", "::ffff:10.0.0.1")),
        ("link-local", ("169.254.169.254", "fe80::1%eth0")),
        ("unusable", ("0.0.0.0", "255.255.255.255", "224.0.0.1", "ff02::1")),
    ],
)
def test_kinds_of_host(kind: str, hosts: tuple[str, ...]) -> None:
    for host in hosts:
        assert host_kind(host) == kind
        assert is_private_host(host) == (kind != "public")
    # Names are judged by themselves.
    names = ("localhost", "a.localhost.", "node.example")
    assert [host_kind(name) for name in names] == [None] * 3
    assert [is_private_host(name) for name in names] == [True, True, False]


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:4101", "private"),
        ("[::ffff:10.0.0.1]:4101", "private"),
        ("169.254.169.254:4101", "private"),
        ("0.0.0.0:4101", "private"),
        ("8.8.8.8:4100", "own"),
        ("1.1.1.1:22", "port"),
        ("1.1.1.1:1023", "port"),
        ("1.1.1.1", "name"),
        ("1.1.1.1:4100", ""),
        ("8.8.8.8:4101", ""),
    ],
)
def test_what_strangers_may_name_on_a_public_run(address: str, reason: str) -> None:
    dialing = _dialing("9.9.9.9:443")
    assert dialing.objection(address) == reason
    if reason and reason != "name":
        assert _refusal(dialing, address) == reason


def test_what_the_operator_named_is_dialled_whatever_it_is_and_as_often() -> None:
    dialing = _dialing("9.9.9.9:443", "127.0.0.1:22")
    for _ in range(30):
        assert _admit(dialing, "9.9.9.9:443") == (("9.9.9.9", 443),)
        assert _admit(dialing, "127.0.0.1:22") == (("127.0.0.1", 22),)
    assert dialing.objection("127.0.0.1:22") == ""


@pytest.mark.parametrize(
    ("named", "config", "address", "is_allowed"),
    [
        (("127.0.0.1:4100",), {}, "127.0.0.1:4999", True),
        (("127.0.0.1:4100",), {}, "10.0.0.1:4999", False),
        (("127.0.0.1",), {}, "127.0.0.1:4999", True),  # Of a DHT's seed only the host is named.
        ((), {"host": "127.0.0.1"}, "127.0.0.1:4999", True),
        ((), {"public_address": "10.0.0.7:4100"}, "10.0.0.8:4999", True),
        ((), {"host": "0.0.0.0"}, "192.168.1.6:4999", True),  # The first of a run in a private network.
        (("192.168.1.9:4100",), {"host": "0.0.0.0"}, "192.168.1.6:4999", True),
        (("8.8.4.4:4100",), {"host": "0.0.0.0"}, "192.168.1.6:4999", False),  # Behind a router, in a public run.
        ((), {"host": "0.0.0.0", "public_address": "8.8.8.8"}, "192.168.1.6:4999", False),
    ],
)
def test_a_kind_is_dialled_where_the_node_was_told_of_one(
    named: tuple[str, ...], config: dict[str, str], address: str, is_allowed: bool
) -> None:
    assert (_dialing(*named, **config).objection(address) == "") is is_allowed
    assert _dialing(*named, allow_private=True, **config).objection(address) == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "192.168.1.5"])
def test_the_own_port_is_not_dialled_whoever_is_claimed_to_be_there(host: str) -> None:
    dialing = _dialing(host="0.0.0.0", allow_private=True)
    assert _refusal(dialing, f"{host}:4100") == "own"
    assert dialing.objection(f"{host}:4101") == ""
    assert _admit(dialing, f"{host}:4100", _OWN) == ((host, 4100),)  # A node may call itself.


@pytest.mark.parametrize("address", ["inside.example:4101", "2130706433:4101", "127.1:4101"])
def test_a_name_is_judged_by_what_it_resolves_to(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    def resolve(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (it, 0)) for it in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    dialing = _dialing()
    found = ["127.0.0.1"]
    assert _refusal(dialing, address) == "private"
    found = ["10.0.0.1", "1.1.1.1"]
    clock_later = _dialing()
    assert _admit(clock_later, address) == (("1.1.1.1", 4101),)
    found = ["127.0.0.1"]  # Rebinding: what was judged is what is dialled.
    clock_later.answered(("1.1.1.1", 4101))
    assert _admit(clock_later, address) == (("1.1.1.1", 4101),)


def test_a_named_host_name_makes_its_kind_known(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("172.18.0.2", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    dialing = _dialing("first:4100")
    assert dialing.objection("172.18.0.3:4100") == "private"
    assert _admit(dialing, "first:4100") == (("172.18.0.2", 4100),)
    assert dialing.objection("172.18.0.3:4100") == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_in_contact", "expected_s"), [(False, [0, 20, 80, 260, 800, 2420]), (True, [0, 10, 40, *range(100, 3600, 60)])]
)
def test_an_address_nobody_answered_at_is_tried_after_pauses_that_grow(
    is_in_contact: bool, expected_s: list[float]
) -> None:
    clock = Clock()
    dialing = _dialing(clock=clock)
    tries_s = []
    for _ in range(3600):
        clock.now_s += 1.0
        if is_in_contact:
            dialing.in_contact("1.1.1.1")
        try:
            _admit(dialing, "1.1.1.1:4100")
        except DialRefusedError as error:
            assert error.reason == "pause"
        else:
            tries_s.append(clock.now_s - 1_000_001.0)
    assert tries_s == expected_s


def test_where_a_node_answers_there_is_no_limit_until_it_has_been_gone_for_long() -> None:
    dialing = _dialing()
    where = ("1.1.1.1", 4100)
    for _ in range(2):
        _admit(dialing, "1.1.1.1:4100")
        dialing.answered(where)
        for _ in range(30):
            _admit(dialing, "1.1.1.1:4100")
            dialing.failed(where)
        _admit(dialing, "1.1.1.1:4100")
        assert _refusal(dialing, "1.1.1.1:4100") == "pause"
        dialing.answered(where)


@pytest.mark.slow
def test_a_host_that_is_silent_is_not_scanned() -> None:
    clock = Clock()
    dialing = _dialing(clock=clock)

    def num_tried(first_port: int, host: str = "1.1.1.1") -> int:
        count = 0
        for port in range(first_port, first_port + 200):
            try:
                _admit(dialing, f"{host}:{port}")
            except DialRefusedError as error:
                assert error.reason == "budget"
            else:
                count += 1
        return count

    assert num_tried(5000) == 8
    clock.now_s += 60
    assert num_tried(6000) == 6
    assert num_tried(6000, "[2606:4700::1]") + num_tried(6000, "[2606:4700::2]") == 8  # One /64.
    dialing.in_contact("1.1.1.1")  # Many nodes behind one address, one of which calls.
    assert num_tried(7000) == 64
    clock.now_s += 60
    assert num_tried(7200) == 60
    for port in range(8000, 8200):  # All of which answer.
        clock.now_s += 1
        _admit(dialing, f"1.1.1.1:{port}")
        dialing.answered(("1.1.1.1", port))
    assert dialing.num_dials("1.1.1.1") == 64
    assert dialing.counts("1.1.1.1:9000") and not dialing.counts("1.1.1.1:8000")
    assert num_tried(9000) == 64
    assert dialing.num_dials("1.1.1.1") < 1
    _admit(dialing, "1.1.1.1:8000")


@pytest.mark.slow
def test_what_is_remembered_is_bounded() -> None:
    clock = Clock()
    dialing = _dialing(clock=clock)
    for number in range(5000):
        clock.now_s += 0.025  # 40 a second, as many as discovery tries.
        host = f"1.2.{number // 250}.{number % 250}"
        _admit(dialing, f"{host}:4100")
        dialing.in_contact(host)
        dialing.answered((host, 4101))
    tables = (dialing._tried, dialing._budgets[False], dialing._contacts, dialing._answered)
    assert all(len(table) <= 4096 for table in tables)


@pytest.mark.parametrize(
    "options",
    [
        {"port": -1},
        {"heartbeat_s": 0.0},
        {"stall_timeout_s": math.nan},
        {"stop_grace_s": -0.1},
        {"max_calls": 0},
        {"heartbeat_s": 6.0, "stall_timeout_s": 10.0},
        {"allowed_peers": ("me",)},
        {"public_address": "host:port"},
    ],
)
def test_a_bad_option_is_named(options: dict[str, object]) -> None:
    name = "stall_timeout_s" if len(options) == 2 else next(iter(options))
    with pytest.raises(TrainerUsageError, match=rf"rpc\.{name}: expected .* found"):
        RpcConfig(**options)  # type: ignore[arg-type]


def test_addresses() -> None:
    assert split_address("10.0.0.1:4100") == ("10.0.0.1", 4100)
    assert split_address("node.example:1") == ("node.example", 1)
    assert split_address("[2001:db8::1]:443") == ("2001:db8::1", 443)
    for address in ("", "host", "host:", ":1", "host:0", "host:65536", "host:1x", "2001:db8::1", "h:١"):
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
    host, _, _ = Endpoint(Identity.create(), "run", RpcConfig()).address.rpartition(":")
    assert host not in ("", "0.0.0.0", "::")  # Listening everywhere gives an address of this machine.


def test_a_run_has_a_name() -> None:
    for run_id in ("", "r" * 129):
        with pytest.raises(TrainerUsageError, match="run_id"):
            Endpoint(Identity.create(), run_id, RpcConfig())
