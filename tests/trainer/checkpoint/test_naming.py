"""Whose checkpoints they are, and what they are called."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint import checkpoint_path, wallet_id
from trainer.errors import TrainerUsageError


def test_the_wallet_follows_from_the_token_wherever_the_node_is() -> None:
    assert wallet_id("secret", "gpu-1") == wallet_id("secret", "gpu-2") == "2bb80d537b1da3e3"


@pytest.mark.parametrize("token", [None, ""])
def test_without_a_token_it_follows_from_the_node_id(token: str | None) -> None:
    assert wallet_id(token, "gpu-1") == wallet_id("gpu-1", "") != wallet_id(token, "gpu-2")


def test_with_neither_it_is_refused() -> None:
    with pytest.raises(TrainerUsageError, match="--node-id"):
        wallet_id(None, "")


@given(st.text(min_size=1), st.text())
def test_it_is_16_hex_digits_and_not_the_token(token: str, node_id: str) -> None:
    wallet = wallet_id(token, node_id)
    assert len(wallet) == 16
    assert set(wallet) <= set("0123456789abcdef")
    assert len(token) < 6 or token not in wallet


def test_the_name_is_that_of_the_specification_below_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    path = checkpoint_path("~/.neuroshard/checkpoints", "ab12")
    assert path == Path("/home/someone/.neuroshard/checkpoints/dynamic_node_ab12.pt")


def test_an_instance_has_files_of_its_own() -> None:
    assert checkpoint_path("/x", "ab12", "layers-0-7").name == "dynamic_node_ab12_layers-0-7.pt"


@pytest.mark.parametrize(("wallet", "instance"), [("", ""), ("../x", ""), ("AB", ""), ("ab", "a/b"), ("ab", "..")])
def test_what_would_lead_elsewhere_is_refused(wallet: str, instance: str) -> None:
    with pytest.raises(TrainerUsageError, match=r"^(wallet|instance): "):
        checkpoint_path("/x", wallet, instance)
