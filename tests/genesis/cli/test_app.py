"""The command line: how it ends, what its commands print and write, plug-ins, and missing extras."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from genesis.cli.app import GROUP, app, run
from genesis.cli.common import printable
from genesis.snapshot import read_vocabulary
from genesis.status import StoreStatus
from genesis.store import FolderStore
from genesis.tokenizer import NeuroTokenizer
from genesis.verification import VerifyReport
from manifests import (
    builtin_sources,
    generate_private_key,
    key_id,
    load_private_key,
    load_public_key,
    packed_key,
    public_key_pem,
    shard_key,
)
from tests.support.populating import ROOT, command
from tests.support.small_store import PRIVATE_KEY, copy_small_store, manifest_of

OUT_OF_RANGE = ("--workers 0", "--shard-tokens 0", "--merges -1", "--lease-s nan", "--sign-key /nowhere/key")


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
        ("populate --source fineweb-edo", "no source is named 'fineweb-edo': did you mean 'fineweb-edu'? known: c4"),
        ("populate --source C4 --input x.csv", "did you mean 'c4'?"),
        ("populate --source hf://nowhere", "hf://owner/name[/pattern][@revision]"),
        ("populate --source all --text-field body", "--source all"),
        ("sources check fineweb-edo", "did you mean 'fineweb-edu'?"),
        *((f"populate --source c4 {option}", option.split()[0]) for option in (*OUT_OF_RANGE, "--input ")),
    ],
)
def test_wrong_usage_ends_with_two(line, said, capsys, tmp_path):
    arguments = line.split(" ") if line else []
    if arguments and arguments[0] in ("populate", "learn"):
        arguments += ["--store", str(tmp_path / "store")]
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err + captured.out
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_a_reader_that_closes_early_is_no_error():
    line = f"{' '.join(command('sources'))} | head -n 1"
    done = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ""


def test_keygen_makes_a_pair_private_from_the_start_whatever_the_umask(tmp_path, capsys, monkeypatch):
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
def test_keygen_overwrites_nothing(tmp_path, there, capsys):
    (tmp_path / there).write_text("precious")
    assert run(["keygen", "--output", str(tmp_path / "k")]) == 2
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "precious"
    assert there in capsys.readouterr().err


def test_export_to_a_folder(tmp_path, capsys):
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


def test_export_into_a_store(tmp_path, capsys):
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
    "other": ("app = 3", "expected a typer.Typer, found int"),
}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Makes a distribution with a plug-in, as pip would."""
    monkeypatch.syspath_prepend(str(tmp_path))
    groups, commands = list(app.registered_groups), list(app.registered_commands)

    def distribution(name, source):
        module = f"plugin_of_test_{name}"
        (tmp_path / f"{module}.py").write_text(source)
        metadata = tmp_path / f"{module}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {module}:app\n")
        return module

    yield distribution
    app.registered_groups[:], app.registered_commands[:] = groups, commands
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


def test_a_plugin_does_not_replace_a_command(install, capsys):
    install("status", COMMANDS)
    assert run(["--help"]) == 0
    assert "Of another package." not in capsys.readouterr().out


GENESIS = [sys.executable, "-c", "from genesis.cli import main; main()"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy_small_store(tmp_path / "store", signed=True)
    return tmp_path / "store"


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    (tmp_path / "key.pub").write_bytes(public_key_pem(PRIVATE_KEY.public_key()))
    return str(tmp_path / "key.pub")


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str, expected: int = 0) -> str:
    code = run([*arguments])
    captured = capsys.readouterr()
    assert code == expected, captured.err
    return captured.out


def test_status(folder, capsys, tmp_path):
    text = output_of(capsys, "status", "--store", str(folder))
    lines = text.splitlines()
    assert lines[0] == str(folder)
    assert "23 shards, 46,000 tokens" in lines[1]
    assert any(line.startswith("alpha ") and "18,000" in line and "ended" in line for line in lines)
    assert "merges by source: alpha 300, beta 40" in lines
    assert "\x1b" not in text
    status = StoreStatus.model_validate_json(output_of(capsys, "status", "--store", str(folder), "--json"))
    assert status.totals.shards == manifest_of(folder).total_shards
    for path in (tmp_path, tmp_path / "missing"):
        assert run(["status", "--store", str(path)]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert len(captured.err.splitlines()) == 1
        assert str(path) in captured.err


@pytest.mark.slow
def test_watch_prints_again_survives_a_store_that_is_gone_and_ends_well_with_ctrl_c(folder):
    command = [*GENESIS, "status", "--store", str(folder), "--watch", "--json", "--interval-s", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = [process.stdout.readline() for _ in range(2)]
        folder.rename(folder.with_name("moved"))
        assert process.stderr.readline().startswith("genesis: ")
        folder.with_name("moved").rename(folder)
        lines.append(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert "Traceback" not in process.stderr.read()
        assert process.wait(30) == 0
    assert [StoreStatus.model_validate_json(line).totals.shards for line in lines] == [23, 23, 23]


def test_verify(folder, key_file, capsys, tmp_path):
    text = output_of(capsys, "verify", "--store", str(folder), "--public-key", key_file)
    assert "verified" in text
    assert "23 of 23 shards sound" in text
    assert text.endswith("no problem found\n")
    text = output_of(capsys, "verify", "--store", str(folder), "--json", "--sample", "3", "--seed", "7")
    report = VerifyReport.model_validate_json(text)
    assert (report.seed, report.counts.shards_verified, report.signature) == (7, 3, "not checked")
    (tmp_path / "key.pub").write_bytes(public_key_pem(generate_private_key().public_key()))
    text = output_of(capsys, "verify", "--store", str(folder), "--public-key", key_file, expected=1)
    assert "SIGNATURE INVALID" in text
    (folder / shard_key(3)).unlink()
    (folder / shard_key(5)).write_bytes(b"")
    text = output_of(capsys, "verify", "--store", str(folder), expected=1)
    problems = sorted(line for line in text.splitlines() if line.startswith("problem: "))
    assert [line.split(": ")[1] for line in problems] == [shard_key(3), shard_key(5)]
    assert text.endswith("2 problems\n")


def test_inspect_shard(folder, capsys):
    text = output_of(capsys, "inspect", "shard", "4", "--store", str(folder), "--documents", "2", "--tokens")
    assert text.startswith(f"{folder}/shard_4.pt\nsource alpha")
    assert text.count("--- document ") == 2
    assert "begins in an earlier shard" in text
    size_bytes = (folder / packed_key(4)).stat().st_size
    assert f"\npacked {size_bytes:,} bytes, {size_bytes / 2_000:.2f} a token, in packed/shard_4.zst\n" in text
    assert "2:'<|eos|>'" in text
    assert run(["inspect", "shard", "23", "--store", str(folder)]) == 2
    found = json.loads(output_of(capsys, "inspect", "shard", "4", "--store", str(folder), "--json"))
    assert found["entry"]["id"] == 4
    assert len(found["documents"]) == 1


def test_inspect_others(folder, tmp_path, capsys):
    for what, expected in {
        "manifest": "23 shards of 2,000 int64 ids",
        "checkpoint": "stands for manifest",
        "vocabulary": "606 ids",
    }.items():
        assert expected in output_of(capsys, "inspect", what, "--store", str(folder))
        assert json.loads(output_of(capsys, "inspect", what, "--store", str(folder), "--json"))["format"] == 1
        assert run(["inspect", what, "--store", str(tmp_path)]) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1
    command = ["inspect", "vocabulary", "--store", str(folder), "--encode", "a list"]
    encoded = json.loads(output_of(capsys, *command, "--json"))
    assert "".join(token["text"] for token in encoded["tokens"]) == "a list"
    vocabulary = read_vocabulary(FolderStore(folder), manifest_of(folder))
    ids = NeuroTokenizer.from_file(vocabulary).encode("a list").tolist()
    assert [token["id"] for token in encoded["tokens"]] == ids


def test_sources(capsys, tmp_path):
    text = output_of(capsys, "sources")
    for spec in builtin_sources().sources:
        assert any(line.startswith(spec.name) and str(spec.hf_path) in line for line in text.splitlines())
    assert "python-docs" in text
    own = tmp_path / "sources.json"
    own.write_text('{"format": 1, "sources": [{"name": "mine", "target_shards": 7}]}')
    listed = json.loads(output_of(capsys, "sources", "--sources-file", str(own), "--json"))
    assert [spec["name"] for spec in listed["sources"]] == ["mine", "python-docs"]
    assert listed["file"] == str(own)


def test_control_characters_reach_no_terminal():
    assert printable("a\x1b[2J\x07b\r\n\tc\x00é漢\x9b") == "a\\x1b[2J\\x07b\\r\n\tc\\x00é漢\\x9b"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [
        ("torch", "import loader; loader.GenesisDataset", "loader"),
        ("torch", "import loader.cli; sys.argv = ['loader', 'bench', '--help']; loader.cli.main()", ""),
        ("torch", "import genesis.cli; sys.argv = ['genesis', 'sources']; genesis.cli.main()", ""),
        (
            "yaml",
            "import runpy; sys.argv = ['t', '--node-id', 'n']; runpy.run_module('trainer', None, '__main__')",
            "train",
        ),
    ],
)
def test_whoever_needs_a_missing_module_is_told_which_extra_brings_it(missing, command, extra):
    code = f"import sys; sys.modules[{missing!r}] = None; {command}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode != 0) == bool(extra), done.stderr
    assert not extra or f"pip install 'genesis-training[{extra}]'" in done.stderr
    assert not extra or "loader" not in extra or "ModuleNotFoundError" in done.stderr
    assert "trainer" not in command or "Traceback" not in done.stderr
