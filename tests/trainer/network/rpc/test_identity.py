"""Keys on disk and signatures."""

from __future__ import annotations

import logging
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.errors import TrainerUsageError
from trainer.network.rpc import Identity, load_or_create_identity, verify_signature

_MAKE = """
import sys
from trainer.network.rpc import load_or_create_identity
sys.stdout.write(load_or_create_identity(sys.argv[1]).peer_id)
"""


def test_an_identity_is_made_once_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "node.pem"
    first = load_or_create_identity(path)
    assert load_or_create_identity(path).peer_id == first.peer_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["node.pem"]


@pytest.mark.slow
def test_processes_that_start_together_share_one_identity(tmp_path: Path) -> None:
    path = tmp_path / "node.pem"
    makers = [
        subprocess.Popen([sys.executable, "-c", _MAKE, str(path)], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    ids = {maker.communicate(timeout=30)[0] for maker in makers}
    assert ids == {load_or_create_identity(path).peer_id}


@pytest.mark.parametrize("content", [b"", b"not a key", b"\x00" * 32])
def test_a_file_that_is_no_key_is_named_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "node.pem"
    path.write_bytes(content)
    with pytest.raises(TrainerUsageError, match=r"node\.pem.*move it away"):
        load_or_create_identity(path)
    assert path.read_bytes() == content


def test_a_path_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainerUsageError, match="cannot be used"):
        load_or_create_identity(tmp_path / "file" / "node.pem")


def test_a_key_others_may_read_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "node.pem"
    load_or_create_identity(path)
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        load_or_create_identity(path)
    assert "chmod 600" in caplog.text


def test_signatures_are_of_one_key_over_one_message() -> None:
    signer, other = Identity.create(), Identity.create()
    signature = signer.sign(b"message")
    assert verify_signature(signer.peer_id, b"message", signature)
    assert not verify_signature(signer.peer_id, b"massage", signature)
    assert not verify_signature(other.peer_id, b"message", signature)
    assert not verify_signature(signer.peer_id, b"message", signature[:-1])


def test_a_key_goes_under_one_name_only() -> None:
    signer = Identity.create()
    signature = signer.sign(b"message")
    for name in (
        signer.peer_id.upper(),
        f" {signer.peer_id}",
        signer.peer_id[:32] + " " + signer.peer_id[32:],
        "",
        "zz",
    ):
        if name != signer.peer_id:
            assert not verify_signature(name, b"message", signature)


def test_the_private_key_is_not_printed() -> None:
    identity = Identity.create()
    assert "Ed25519PrivateKey" not in repr(identity)
    assert identity.peer_id in repr(identity)
