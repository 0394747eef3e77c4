"""Where the others were is kept for a node that is started again without an address, whatever is in its file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.announcements import announcement
from trainer.network.rpc.identity import Identity
from trainer.run.config import RunConfig, from_mapping
from trainer.run.node.remembered_peers import RememberedPeers


def _said(port: int):
    return announcement(Identity.create(), address=f"203.0.113.7:{port}")


def test_what_was_noted_is_known_to_the_next_process(tmp_path: Path) -> None:
    now_s = [0.0]
    path = tmp_path / "peers" / "run" / "n.json"
    known = RememberedPeers(path, lambda: now_s[0])
    assert known.addresses() == ()
    known.note([])
    assert not path.exists()
    known.note([_said(port) for port in range(4100, 4140)])
    assert len(RememberedPeers(path).addresses()) == 16
    known.note([_said(4200)])
    assert len(RememberedPeers(path).addresses()) == 16, "the disk is spared for a minute"
    now_s[0] = 61.0
    known.note([])  # Who is alone for a while forgets nobody.
    known.note([_said(4200)])
    assert RememberedPeers(path).addresses() == ("203.0.113.7:4200",)


def test_they_are_for_a_node_that_is_given_no_address(tmp_path: Path) -> None:
    config = from_mapping(RunConfig, {"node_id": "n", "run_id": "r", "state_dir": str(tmp_path)})
    RememberedPeers.of(config).note([_said(4100)])
    assert RememberedPeers.of(config).completed(config).discovery.initial_peers == ("203.0.113.7:4100",)
    given = replace(config, discovery=replace(config.discovery, initial_peers=("203.0.113.8:1",)))
    assert RememberedPeers.of(given).completed(given) is given


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff\x00",
        b"[1, null]",
        b'["nonsense"]',
        b'["127.0.0.1:1", "/ip4/127.0.0.1/tcp/1/p2p/x"]',
        b"[" * 10_000,
        json.dumps(["h:1"] * 9_000).encode(),
    ],
)
def test_a_file_that_says_nothing_is_as_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "n.json"
    path.write_bytes(content)
    assert RememberedPeers(path).addresses() == ()


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "peers").write_text("a file")
    RememberedPeers(tmp_path / "peers" / "n.json").note([_said(4100)])
