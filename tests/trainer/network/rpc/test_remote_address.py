"""Which addresses count as one host, and which a stranger may not have a node dial."""

from __future__ import annotations

import pytest

from trainer.network.rpc.remote_address import address_group, group_of_grpc_peer, is_private_host


@pytest.mark.parametrize(
    ("host", "group"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("[2001:db8:1:2:3::4]", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("fe80::1%eth0", "fe80::/64"),
        ("Node.Example", "node.example"),
    ],
)
def test_what_counts_as_one_host(host: str, group: str) -> None:
    assert address_group(host) == group


@pytest.mark.parametrize(
    ("grpc_peer", "group"),
    [
        ("ipv4:127.0.0.1:5000", "127.0.0.1"),
        ("ipv6:%5B2001:db8::1%5D:5000", "2001:db8::/64"),
        ("ipv6:[::1]:5000", "::/64"),
        ("unix:/tmp/socket", "unix:/tmp/socket"),
    ],
)
def test_how_grpc_names_them(grpc_peer: str, group: str) -> None:
    assert group_of_grpc_peer(grpc_peer) == group


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.1.1", "100.64.0.1", "0.0.0.0"),
        *("::1", "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1", "224.0.0.1", "ff02::1", "localhost", "a.localhost."),
    ],
)
def test_private_hosts(host: str) -> None:
    assert is_private_host(host)


@pytest.mark.parametrize("host", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "node.example.org"])
def test_public_hosts(host: str) -> None:
    assert not is_private_host(host)
