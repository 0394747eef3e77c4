"""Commands that other packages bring: found by entry point, and none of them can break genesis."""

import sys

import pytest
import typer

from genesis.cli.app import app as genesis_app
from genesis.cli.app import run
from genesis.cli.plugins import GROUP, add_plugins

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
