"""docs/loader.md does what it says: its Python runs against a store, and the options it names are there."""

import itertools
import re
from pathlib import Path

import pytest

from manifests import public_key_pem
from tests.support.small_store import PRIVATE_KEY, SOURCES, copy_small_store

DOCUMENT = Path(__file__).parents[2] / "docs" / "loader.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
BLOCKS = [
    "\n" * TEXT.count("\n", 0, found.start(1)) + found[1]  # So that a traceback names the document's lines.
    for found in re.finditer(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
]
PLACEHOLDERS = dict(zip(("fineweb-edu", "slimpajama"), SOURCES, strict=True))


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    """What stands for the document's addresses: two copies of a signed store."""
    folder = tmp_path_factory.mktemp("docs")
    names = ("cdn", "mirror")
    return {f"https://{name}.example.org": copy_small_store(folder / name, signed=True).url for name in names}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's, of torch
def test_its_python_runs_from_top_to_bottom(addresses, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GENESIS_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "genesis-key.pem.pub").write_bytes(public_key_pem(PRIVATE_KEY.public_key()))
    trained = itertools.count()

    def train(input_ids, labels):
        assert input_ids.shape == labels.shape == (8, 1024)
        assert input_ids[:, 1:].equal(labels[:, :-1])
        return 1.0 / (1 + next(trained))

    names = {"train": train, "evaluate": lambda batch: float(len(batch["input_ids"]))}
    for block in BLOCKS:
        for placeholder, real in {**addresses, **PLACEHOLDERS}.items():
            block = block.replace(placeholder, real)
        exec(compile(block, str(DOCUMENT), "exec"), names)
    assert next(trained) == 5
    assert names["losses"] == [2.0]  # One held-out shard of each source, of one window.
    printed = capsys.readouterr().out.splitlines()
    assert "23 shards in the store now" in printed
    assert any(re.fullmatch("[0-9a-f]{64}", line) for line in printed)
    assert "2 torch.Size([1024])" in printed


def test_the_options_it_names_are_there(capsys):
    from loader.cli.app import app, run

    known = set()
    for command in app.registered_commands:
        assert run([command.name, "--help"]) == 0
        known |= set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    named = set(re.findall(r"--[a-z][a-z-]+", TEXT))
    assert len(named) > 20
    assert named <= known


def test_every_error_it_could_show_is_explained():
    import loader

    errors = {name for name in loader.__all__ if name.endswith("Error")} - {"LoaderError"}
    shown = {"CacheError", "UntrustedManifestError"}  # Of `genesis cache` alone, and the base of three that are there.
    assert errors - shown <= set(re.findall(r"\| `([A-Za-z]+Error)` \|", TEXT))
