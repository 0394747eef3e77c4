"""``--quiet`` and ``--verbose``: how much commands tell of what they do, on standard error.

Every command of a tree takes both, and so does every group, so it does not matter whether they stand before a
command's name or behind it; the last one counts. ``GENESIS_LOG`` (a level of `logging`, ``INFO`` by default) says what
goes without them. Progress bars are shown as long as INFO is.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer


def set_up_logging(packages: Sequence[str]) -> None:
    """Sends what is logged to standard error: of ``packages`` from ``GENESIS_LOG`` on, of others from WARNING on."""
    level = os.environ.get("GENESIS_LOG", "INFO").upper()
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    _set_level(packages, level if level in logging.getLevelNamesMapping() else "INFO")


def add_verbosity(command: Any, packages: Sequence[str]) -> None:
    """Gives a command and all commands below it the two options.

    Args:
        command: what `typer.main.get_command` returned; options of those names that a command has already are kept.
        packages: whose logging they set.
    """
    _add(command, _options(packages))


def _add(command: Any, options: Sequence[Any]) -> None:
    taken = {name for parameter in command.params for name in parameter.opts}
    command.params += [option for option in options if not taken.intersection(option.opts)]
    for below in getattr(command, "commands", {}).values():
        _add(below, options)


def _options(packages: Sequence[str]) -> Sequence[Any]:
    """The two as options of typer, which makes them out of a function's parameters."""

    def be_quiet(asked: bool) -> None:
        if asked:
            _set_level(packages, "WARNING")

    def tell_all(asked: bool) -> None:
        if asked:
            _set_level(packages, "DEBUG")

    def options(  # Defaults, not Annotated: typer could not resolve the names of local functions in annotations.
        quiet: bool = typer.Option(
            False,
            "--quiet",
            "-q",
            callback=be_quiet,
            expose_value=False,
            help="Tell warnings, errors and the result.",
        ),
        verbose: bool = typer.Option(
            False, "--verbose", "-v", callback=tell_all, expose_value=False, help="Tell everything, for a report."
        ),
    ) -> None:
        """Never run."""

    carrier = typer.Typer(add_completion=False, rich_markup_mode=None)
    carrier.command()(options)
    return typer.main.get_command(carrier).params


def _set_level(packages: Sequence[str], level: str) -> None:
    for name in packages:
        logging.getLogger(name).setLevel(level)
