"""How a command line ends: one line and the right exit code, never a traceback; and what it does not import."""

import subprocess
import sys

import pytest

from loader.cli.app import app, run
from manifests import public_key_pem
from tests.support.loader_command import ROOT, LoaderCommand
from tests.support.small_store import PRIVATE_KEY, copy_small_store


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "Usage: python -m loader"),
        ("nonsense", "nonsense"),
        ("plan --bad", "--bad"),
        ("plan", "expected --node-id ID, found none"),
        ("plan --node-id ", "expected the id of a node, found nothing"),
        ("plan --node-id \udcff", "in UTF-8"),
        ("plan --nodes-from /nowhere", "--nodes-from /nowhere: No such file"),
        ("plan --node-id a --count 0", "--count"),
        ("plan --node-id a --assignment random", "--assignment"),
        ("plan --node-id a --source alpha=x", "expected NAME=WEIGHT"),
        ("plan --node-id a --source alpha=0", "weights above 0"),
        ("plan --node-id a --source gamma", "(alpha, beta), found 'gamma'"),
        ("plan --node-id a --holdout 99", "expected shards to read"),
        ("plan --node-id a --total-shards 24", "expected at most 23"),
        ("plan --node-id a --verify 3,x", "--verify: expected whole numbers"),
        ("plan --node-id a --node-id b --verify 3", "expected one --node-id, found 2"),
        ("plan --node-id a --cache-bytes 20G", "expected a size such as 20GB"),
        ("plan --node-id a --max-bandwidth fast", "expected a size such as 20GB"),
        ("plan --node-id a --public-key /nowhere", "--public-key /nowhere: No such file"),
        ("plan --node-id a --mirror ftp://nowhere", "ftp"),
        ("fetch --node-id a --jobs 0", "--jobs"),
        ("verify", "expected --node-id ID"),
        ("verify --all --node-id a", "expected --all or --node-id"),
        ("verify --node-id a --claim 00", "expected --replay STEP"),
        ("verify --node-id a --replay 0 --claim 00", "expected 64 hexadecimal digits"),
        ("verify --node-id a --replay 0 --rotations 1,", "--rotations"),
        ("bench --node-id a --node-id b", "expected one --node-id, found 2"),
    ],
)
def test_wrong_usage_ends_with_two(line, said, here):
    assert said in "".join(here(*(line.split(" ") if line else []), expect=2))


@pytest.mark.parametrize("command", [[], *([name.name or ""] for name in app.registered_commands)])
def test_help_is_there(command, capsys):
    assert run([*command, "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


def test_the_version_is_that_of_the_package(capsys):
    from genesis import __version__

    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"loader {__version__}\n"


@pytest.mark.slow
@pytest.mark.parametrize("store", ["/nowhere/at/all", "http://127.0.0.1:9/store"])
def test_a_store_that_is_not_there_ends_with_one(store, tmp_path):
    done = LoaderCommand(store, tmp_path)("plan", "--node-id", "a", "--timeout-s", "0.5", expect=1, GENESIS_LOG="ERROR")
    assert done.stdout == ""
    assert done.stderr.startswith("loader: ") and store in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_pinned_key_is_held_against_the_store(tmp_path):
    from manifests import generate_private_key

    copy_small_store(tmp_path / "signed", signed=True)
    loader = LoaderCommand(str(tmp_path / "signed"), tmp_path / "cache")
    for name, key in (("right", PRIVATE_KEY), ("wrong", generate_private_key())):
        (tmp_path / name).write_bytes(public_key_pem(key.public_key()))
    assert loader("plan", "--node-id", "a").stderr == "", "a folder of this machine needs no key"
    assert loader("plan", "--node-id", "a", "--public-key", tmp_path / "right").stderr == ""
    refused = loader("plan", "--node-id", "a", "--public-key", tmp_path / "wrong", expect=1, GENESIS_LOG="ERROR")
    assert refused.stdout == "" and len(refused.stderr.splitlines()) == 1


def test_a_mirror_stands_in_for_a_store_that_is_gone(here, store):
    done = here.json("fetch", "--node-id", "a", "--store", store.parent / "gone", "--mirror", store)
    assert len(done["fetched"]) == 10


@pytest.mark.slow
def test_a_reader_that_closes_early_is_no_error(loader):
    nodes = " ".join(f"--node-id {number}" for number in range(500))
    line = f"{sys.executable} -m loader plan {nodes} | head -n 1"
    done = subprocess.run(
        line, shell=True, cwd=ROOT, env=loader.environment(), capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith(loader.store)
    assert "Error" not in done.stderr and "loader:" not in done.stderr


@pytest.mark.slow
def test_a_terminal_without_the_letters_of_a_node_id_is_no_error(loader):
    assert loader("plan", "--node-id", "ł", PYTHONIOENCODING="latin-1").stdout.startswith("\\u0142: 10 of ")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plan", "fetch", "verify"])
def test_torch_is_not_imported_where_it_is_not_needed(command, loader):
    script = (
        "import sys\nfrom loader.cli.app import run\n"
        f"code = run(['{command}', '--node-id', 'a'])\n"
        "sys.exit(f'torch was imported' if 'torch' in sys.modules else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=loader.environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "a" in done.stdout
