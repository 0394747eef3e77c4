"""The same weights have the same fingerprint wherever they lie, and others another one, however large the files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.model_configs import small_config
from tests.support.stage_files import random_model
from trainer.checkpoint.stages import export_torchtitan, fingerprint
from trainer.errors import CheckpointError, CorruptCheckpointError
from trainer.model import export_hf


@pytest.fixture(params=["hf", "titan"])
def model(request: pytest.FixtureRequest, tokenizer_json: Path, tmp_path: Path) -> Path:
    config = small_config(vocab_size=300)
    write = export_hf if request.param == "hf" else export_torchtitan
    write(random_model(config).state_dict(), config, tokenizer_json, tmp_path / "model")
    return tmp_path / "model"


def _weights(folder: Path) -> Path:
    return next(path for path in sorted(folder.rglob("*")) if path.suffix in (".safetensors", ".distcp"))


def test_a_copy_under_another_name_and_with_other_notes_is_the_same(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("another one")
    assert fingerprint(tmp_path / "copy") == fingerprint(str(model))


@pytest.mark.parametrize("change", ["a byte", "shorter", "longer"])
def test_another_byte_is_another_model(model: Path, change: str) -> None:
    before, weights = fingerprint(model), _weights(model)
    found = bytearray(weights.read_bytes())
    if change == "a byte":
        found[len(found) // 2] ^= 1
    weights.write_bytes(found[:-1] if change == "shorter" else found + b"\0" if change == "longer" else found)
    assert fingerprint(model) != before


def test_of_a_large_file_a_part_is_read(tmp_path: Path) -> None:
    size_bytes, block_bytes = 5 << 30, 1 << 16
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(size_bytes)
    seen = {fingerprint(tmp_path)}
    for offset in (0, size_bytes // 255 + 7, size_bytes - block_bytes // 2, size_bytes - 1):
        with weights.open("r+b") as file:
            file.seek(offset)
            file.write(b"x")
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 5
    with weights.open("r+b") as file:
        file.truncate(size_bytes - (1 << 12))
    assert fingerprint(tmp_path) not in seen


def test_all_files_that_the_index_names_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    places = {"a": "1.safetensors", "b": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for name in ("1", "2", "consolidated"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"weights")
    before = fingerprint(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"of no account")
    assert fingerprint(tmp_path) == before
    (tmp_path / "2.safetensors").write_bytes(b"Weights")
    assert fingerprint(tmp_path) != before
    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"expected files that can be read, found: .*2\.safetensors"):
        fingerprint(tmp_path)


def test_what_is_no_model_has_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a Hugging Face folder"):
        fingerprint(tmp_path)
