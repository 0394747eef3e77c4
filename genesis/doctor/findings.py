"""One check's finding, all of them as a report, and a line each for people.

A check is a function that returns a finding and raises nothing that a machine, a network or a user can cause:
`Checkup.take` turns what does get out into a failed finding, so that one broken thing hides no other.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable
from typing import Final, Literal, Self, TextIO

import typer
from pydantic import BaseModel, ConfigDict

Group = Literal["machine", "store", "network", "run"]
Status = Literal["ok", "warning", "failed", "skipped"]

REPORT_FORMAT: Final = 1
_MARKS: Final[dict[Status, tuple[str, str, str]]] = {
    "ok": ("✓", "ok  ", typer.colors.GREEN),
    "warning": ("!", "warn", typer.colors.YELLOW),
    "failed": ("✗", "FAIL", typer.colors.RED),
    "skipped": ("-", "skip", typer.colors.BRIGHT_BLACK),
}
"""By status: the mark, what stands for it where the terminal's encoding has no such character, and its colour."""
_MAX_TEXT: Final = 600


class Finding(BaseModel):
    """What one check has found."""

    model_config = ConfigDict(frozen=True)

    group: Group
    check: str
    """Its name, the same in all releases; several findings may be of one check, each about another thing."""
    status: Status
    found: str
    """What was expected where that is not obvious, and what was found."""
    cure: str = ""
    """What to do; never empty for what has failed."""
    figures: dict[str, float] = {}
    """What was measured, with units in the names."""

    @classmethod
    def ok(cls, group: Group, check: str, found: str, **figures: float) -> Self:
        """What is as it should be."""
        return cls(group=group, check=check, status="ok", found=found, figures=figures)

    @classmethod
    def warning(cls, group: Group, check: str, found: str, cure: str, **figures: float) -> Self:
        """What works, but badly."""
        return cls(group=group, check=check, status="warning", found=found, cure=cure, figures=figures)

    @classmethod
    def failed(cls, group: Group, check: str, found: str, cure: str, **figures: float) -> Self:
        """With what nothing works."""
        return cls(group=group, check=check, status="failed", found=found, cure=cure, figures=figures)

    @classmethod
    def skipped(cls, group: Group, check: str, why: str) -> Self:
        """What was not looked at, and why."""
        return cls(group=group, check=check, status="skipped", found=why)

    def text(self) -> str:
        """The line without its mark; what came from elsewhere is shown without control characters, and cut."""
        cure = f"; {self.cure}" if self.cure else ""
        return f"{self.check}: {_one_line(self.found)}{_one_line(cure)}"


class DoctorReport(BaseModel):
    """All findings, as ``--json`` prints them."""

    model_config = ConfigDict(frozen=True)

    format: int = REPORT_FORMAT
    ok: bool
    """Nothing has failed."""
    findings: tuple[Finding, ...]


class Checkup:
    """Collects findings; ``show`` gets each at once.

    Args:
        show: called with every finding, in order.
        errors: what a check may raise beyond OSError, for which its finding then is that it has failed.
    """

    def __init__(
        self, show: Callable[[Finding], None] = lambda _: None, errors: tuple[type[Exception], ...] = ()
    ) -> None:
        self._show = show
        self._errors: tuple[type[Exception], ...] = (*errors, OSError)
        self._findings: list[Finding] = []

    def add(self, findings: Finding | Iterable[Finding]) -> None:
        """Takes a finding, or several."""
        for finding in (findings,) if isinstance(findings, Finding) else findings:
            self._findings.append(finding)
            self._show(finding)

    def take(self, group: Group, check: str, look: Callable[[], Finding | Iterable[Finding]], cure: str) -> None:
        """Makes a check; ``cure`` is for what it raises."""
        try:
            self.add(look())
        except self._errors as error:
            self.add(Finding.failed(group, check, problem_of(error), cure))

    def has_failed(self, check: str) -> bool:
        """Whether a finding of this check has failed."""
        return any(each.check == check and each.status == "failed" for each in self._findings)

    def report(self) -> DoctorReport:
        """All that was found so far."""
        return DoctorReport(ok=all(each.status != "failed" for each in self._findings), findings=tuple(self._findings))


def line_printer(stream: TextIO | None = None) -> Callable[[Finding], None]:
    """What prints a finding as a line; in colours on a terminal, unless ``NO_COLOR`` is set."""
    out = sys.stdout if stream is None else stream
    is_coloured = out.isatty() and not os.environ.get("NO_COLOR")
    column = 0 if _encodes(out, "".join(mark for mark, _, _ in _MARKS.values())) else 1

    def show(finding: Finding) -> None:
        marks = _MARKS[finding.status]
        mark = typer.style(marks[column], fg=marks[2], bold=True) if is_coloured else marks[column]
        typer.echo(f"{mark} {finding.text()}", file=out, color=is_coloured or None)

    return show


def summary(report: DoctorReport) -> str:
    """The last line, for people."""
    failed = [each.check for each in report.findings if each.status == "failed"]
    num_warnings = sum(each.status == "warning" for each in report.findings)
    warnings = f", {num_warnings} warnings" if num_warnings else ""
    if not failed:
        return f"{len(report.findings)} checks, nothing stands in the way{warnings}"
    return f"{len(report.findings)} checks, {len(failed)} failed ({', '.join(dict.fromkeys(failed))}){warnings}"


def problem_of(error: Exception) -> str:
    """What an error says was expected and found, without what it says to do: a finding has a cure of its own."""
    text = " ".join(str(error).split())
    return text.rpartition("; ")[0] or text or type(error).__name__


def quieten(packages: Iterable[str]) -> None:
    """Leaves out what packages log below warnings, unless more than usual was asked for: findings say it."""
    for name in packages:
        found = logging.getLogger(name)
        if found.getEffectiveLevel() == logging.INFO:
            found.setLevel(logging.WARNING)


def _encodes(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _one_line(text: str) -> str:
    shown = "".join(character if character.isprintable() else " " for character in text)
    return shown if len(shown) <= _MAX_TEXT else shown[: _MAX_TEXT - 1] + "…"
