"""The options of a seed: whom it relays for, and what makes no sense without ``--relay``."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.signed_runs import OWNER, SMALL
from trainer.network.discovery.dht_client import Record
from trainer.network.discovery.seed import hear_revocations
from trainer.network.rpc import Identity
from trainer.network.rpc.admission import Admission
from trainer.network.rpc.credential import RevokedPeers
from trainer.run.cli import seed
from trainer.run.cli.app import run
from trainer.run.config import RunConfig, from_mapping
from trainer.run.signed import RunFile

_KEY = "ab" * 32
_CONFIG = from_mapping(RunConfig, SMALL)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--relay-port", "5000"), "--relay-port: expected --relay with it"),
        (("--relay-first-port", "42000", "--relay-mbit", "5"), "--relay-first-port, --relay-mbit: expected --relay"),
        (("--run-name", "a", "--authority-key", _KEY), "--run-name, --authority-key: expected --relay with it"),
        (("--relay", "--run-name", "a"), "expected both or neither"),
        (("--relay", "--run-name", "a", "--authority-key", "ab"), "expected 64 hexadecimal digits"),
        (("--relay", "--run", "r.json", "--run-name", "a"), "expected no --run-name"),
        (("--relay", "--relay-port", "70000"), "0 to 65535"),
        (("--relay", "--relay-port", "4801", "--port", "4801"), "expected another port than --port, found 4801"),
    ],
)
def test_options_that_make_no_sense_are_one_line(
    options: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["seed", *options]) == 2
    said = capsys.readouterr().err.strip()
    assert expected in said
    assert len(said.splitlines()) == 1


def test_a_seed_without_its_extra_relays_nothing_before_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    ports = ("--port", "0", "--relay", "--relay-port", "0")
    with pytest.raises(ModuleNotFoundError, match=r"genesis-training\[dht\]"):  # One line, by whoever calls it.
        run(["seed", *ports, "--host", "127.0.0.1", "--identity", str(tmp_path / "seed.id")])
    assert "relays for nodes" not in caplog.text


def test_a_relay_knows_its_run_by_the_signed_file_or_by_name_and_keys(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(RunFile.of(_CONFIG, OWNER.peer_id, authorities=(OWNER.peer_id,)).signed(OWNER).to_json())
    members = seed._relayed_members(str(path), "", [])
    assert members is not None
    assert (members.run_name, members.authorities) == ("corpus-8", {OWNER.peer_id})
    path.write_bytes(RunFile.of(_CONFIG, OWNER.peer_id).signed(OWNER).to_json())
    assert seed._relayed_members(str(path), "", []) is None  # Open to anybody.
    named = seed._relayed_members("", "a-run", [_KEY])
    assert named is not None
    assert (named.run_name, named.authorities) == ("a-run", {_KEY})
    assert seed._relayed_members("", "", []) is None


class _Kept:
    """Stands where the DHT's process does, with what it keeps."""

    def __init__(self, *records: Record) -> None:
        self.records = records

    async def get(self, _key: str, _timeout_s: float) -> tuple[tuple[Record, ...], int]:
        return self.records, 0


async def test_a_seed_hears_of_revoked_members_by_its_authority_alone() -> None:
    authority, stranger = Identity.create(), Identity.create()
    members, now = Admission("a-run", [authority.peer_id]), time.time()

    def kept(signer: Identity, subkey: str, run_name: str = "a-run") -> Record:
        wire = RevokedPeers.issue(signer, run_name, 7, [_KEY], now).wire()
        return Record(subkey=subkey, value=wire.decode())

    false = (
        kept(stranger, stranger.peer_id),
        kept(stranger, authority.peer_id),
        kept(authority, authority.peer_id, "another"),
        Record(subkey=authority.peer_id, value="noise"),
    )
    await hear_revocations(_Kept(*false), members)  # type: ignore[arg-type]
    assert not members.is_revoked(_KEY)
    await hear_revocations(_Kept(*false, kept(authority, authority.peer_id)), members)  # type: ignore[arg-type]
    assert members.is_revoked(_KEY)
