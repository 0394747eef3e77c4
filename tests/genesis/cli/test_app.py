"""How a command line ends, what keygen and export write, and commands that other packages bring."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from tokenizers import Tokenizer

from genesis.cli.app import app, run
from genesis.cli.app import app as genesis_app
from genesis.cli.plugins import GROUP, add_plugins
from genesis.snapshot import read_vocabulary
from genesis.store import FolderStore
from genesis.tokenizer import NeuroTokenizer
from manifests import key_id, load_private_key, load_public_key
from tests.support.populating import ROOT, command, genesis
from tests.support.small_store import copy_small_store, manifest_of


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "Usage: genesis"),
        ("inspect", "Usage: genesis inspect"),
        ("status --bad", "--bad"),
        ("populate", "--source"),
        ("populate --source c4 --workers many", "--workers"),
        ("nonsense", "nonsense"),
        ("learn", "--all"),
        ("learn --all --input nowhere", "NAME=PATTERN"),
        ("populate --source all --input x", "--source all"),
        ("populate --source fineweb-edo", "no source is named 'fineweb-edo'; known: c4"),
    ],
)
def test_wrong_usage_ends_with_two(line, said, capsys, tmp_path):
    arguments = line.split()
    if arguments and arguments[0] in ("populate", "learn"):
        arguments += ["--store", str(tmp_path / "store")]
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err + captured.out
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("words", [[], *([name.name or ""] for name in app.registered_commands)])
def test_help_is_there(words, capsys):
    assert run([*words, "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


@pytest.mark.slow
def test_what_a_user_can_mend_and_readers_that_close_early(tmp_path):
    done = genesis("status", "--store", tmp_path / "absent", expect=1)
    assert done.stdout == ""
    assert done.stderr.startswith("genesis: ")
    assert len(done.stderr.splitlines()) == 1
    line = f"{' '.join(command('sources'))} | head -n 1"
    done = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ""


def test_keygen_makes_a_pair_private_from_the_start_whatever_the_umask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    opened = os.open

    def spy(path: str | Path, flags: int, mode: int = 0o777) -> int:
        descriptor = opened(path, flags, mode)
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return descriptor

    path = tmp_path / "keys" / "genesis.pem"
    before = os.umask(0)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", spy)
            assert run(["keygen", "--output", str(path)]) == 0
    finally:
        os.umask(before)
    assert modes == [0o600, 0o644]
    private = load_private_key(path.read_bytes())
    public = load_public_key(path.with_name("genesis.pem.pub").read_bytes())
    assert key_id(private.public_key()) == key_id(public)
    assert key_id(public) in capsys.readouterr().out


@pytest.mark.parametrize("there", ["k", "k.pub"])
def test_keygen_overwrites_nothing(tmp_path: Path, there: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / there).write_text("precious")
    assert run(["keygen", "--output", str(tmp_path / "k")]) == 2
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "precious"
    assert there in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert run(["keygen", "--output", str(tmp_path / "file" / "k")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_export_to_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = copy_small_store(tmp_path / "store")
    target = tmp_path / "out"
    assert run(["export", "tokenizer", "--to", "hf", "--store", store.url, "--output", str(target)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        str(target / "tokenizer.json"),
        str(target / "tokenizer_config.json"),
    ]
    text = "the list of items, é漢 <|eos|>"
    expected = NeuroTokenizer.from_file(read_vocabulary(store, manifest_of(tmp_path / "store"))).encode(text)
    assert Tokenizer.from_file(str(target / "tokenizer.json")).encode(text).ids == expected.tolist()
    monkeypatch.chdir(tmp_path)
    assert run(["export", "tokenizer", "--to", "tiktoken", "--store", store.url]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert all(path.parent == Path("tokenizer-tiktoken") and path.is_file() for path in written)


def test_export_into_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = copy_small_store(tmp_path / "store")
    for target in ("hf", "tiktoken"):
        assert run(["export", "tokenizer", "--to", target, "--store", store.url, "--publish"]) == 0
    assert json.loads(FolderStore(tmp_path / "store").get("hf/tokenizer.json").body)["model"]["type"] == "BPE"
    assert [info.key for info in store.list("tiktoken/")] == ["tiktoken/genesis.json", "tiktoken/genesis.tiktoken"]
    capsys.readouterr()
    assert run(["verify", "--store", store.url]) == 0
    assert run(["export", "tokenizer", "--to", "hf", "--store", str(tmp_path)]) == 1
    options = ["--publish", "--output", str(tmp_path)]
    assert run(["export", "tokenizer", "--to", "hf", "--store", str(tmp_path), *options]) == 2
    assert "--publish" in capsys.readouterr().err


COMMANDS = """
import typer
app = typer.Typer(help="Of another package.")

@app.command()
def say() -> None:
    typer.echo("said")

@app.command()
def fail() -> None:
    typer.echo("genesis: cannot", err=True)
    raise typer.Exit(3)
"""
BROKEN = {
    "raises": ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
    "needs": ("import a_package_that_is_not_here", "ModuleNotFoundError"),
    "lacks": ("", "AttributeError"),
    "other": ("app = 3", "expected a typer.Typer, found int"),
}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Makes a distribution with a plug-in, as pip would."""
    monkeypatch.syspath_prepend(str(tmp_path))
    groups, commands = list(genesis_app.registered_groups), list(genesis_app.registered_commands)

    def distribution(name, source):
        module = f"plugin_of_test_{name}"
        (tmp_path / f"{module}.py").write_text(source)
        metadata = tmp_path / f"{module}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {module}:app\n")
        return module

    yield distribution
    genesis_app.registered_groups[:], genesis_app.registered_commands[:] = groups, commands
    for module in [module for module in sys.modules if module.startswith("plugin_of_test_")]:
        del sys.modules[module]


def test_a_plugin_is_a_command_like_any_other(install, capsys):
    install("another", COMMANDS)
    assert run(["another", "say"]) == 0
    assert capsys.readouterr().out == "said\n"
    assert run(["another", "fail"]) == 3
    assert capsys.readouterr().err == "genesis: cannot\n"
    assert run(["--help"]) == 0
    assert "Of another package." in capsys.readouterr().out


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_costs_one_line(install, capsys, kind):
    source, said = BROKEN[kind]
    module = install("broken", source)
    install("another", COMMANDS)
    assert run(["--help"]) == 0
    out, err = capsys.readouterr()
    assert "populate" in out and "another" in out and "broken" not in out
    assert len(err.splitlines()) == 1
    assert err.startswith(f"genesis: the command 'broken' of {module}:app is left out: ") and said in err
    assert run(["broken"]) == 2
    assert "No such command 'broken'" in capsys.readouterr().err


def test_only_what_the_command_line_needs_is_imported(install):
    module = install("another", COMMANDS)
    broken = install("broken", "raise RuntimeError")
    application = typer.Typer()
    application.command("populate")(lambda: None)
    add_plugins(application, ["populate", "--help"])
    assert not {module, broken} & set(sys.modules)
    add_plugins(application, ["another"])
    add_plugins(application, ["another"])
    assert module in sys.modules and broken not in sys.modules
    assert [group.name for group in application.registered_groups] == ["another"]


def test_a_plugin_does_not_replace_a_command(install, capsys):
    install("status", COMMANDS)
    assert run(["--help"]) == 0
    assert "Of another package." not in capsys.readouterr().out
