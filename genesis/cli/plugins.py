"""Commands that other packages bring: ``loader`` has ``genesis cache``, though genesis may not import it.

A package declares a `typer.Typer` in the entry-point group ``genesis.commands``. The group is looked up (40 ms) only
where the command line names none of genesis' own commands, and only the plug-in that it names is imported; the help
needs all of them. A plug-in that cannot be loaded costs one line on standard error; everything else goes on working.

A plug-in's own errors are its own to tell: its commands print one line and raise ``typer.Exit``.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

import typer

GROUP = "genesis.commands"


def add_plugins(app: typer.Typer, arguments: Sequence[str]) -> None:
    """Adds the plug-ins that a command line needs.

    Args:
        app: the application; one that has a command of a plug-in's name keeps it.
        arguments: the command line, without the name of the program.
    """
    known = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    wanted = next((argument for argument in arguments if not argument.startswith("-")), None)
    if wanted in known:
        return
    found = importlib.metadata.entry_points(group=GROUP)
    named = [plugin for plugin in found if plugin.name == wanted]
    for plugin in named or found:
        if plugin.name not in known:
            _add(app, plugin)


def _add(app: typer.Typer, plugin: importlib.metadata.EntryPoint) -> None:
    try:
        commands = plugin.load()
        if not isinstance(commands, typer.Typer):
            raise TypeError(f"expected a typer.Typer, found {type(commands).__name__}")
    except Exception as error:  # noqa: BLE001  importing other people's code can raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        typer.echo(f"genesis: the command '{plugin.name}' of {plugin.value} is left out: {reason}", err=True)
        return
    app.add_typer(commands, name=plugin.name)
