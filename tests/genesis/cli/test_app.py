"""How a command line ends: one line and the right exit code, never a traceback."""

import pytest

from genesis.cli.app import app, run
from tests.support.populating import genesis


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


@pytest.mark.parametrize("command", [[], *([name.name or ""] for name in app.registered_commands)])
def test_help_is_there(command, capsys):
    assert run([*command, "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


@pytest.mark.slow
def test_what_a_user_can_mend_ends_with_one(tmp_path):
    done = genesis("status", "--store", tmp_path / "absent", expect=1)
    assert done.stdout == ""
    assert done.stderr.startswith("genesis: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_reader_that_closes_early_is_no_error(tmp_path):
    import subprocess

    from tests.support.populating import ROOT, command

    done = subprocess.run(
        f"{' '.join(command('sources'))} | head -n 1", shell=True, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stderr == ""
