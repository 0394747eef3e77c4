"""docs/specification.md keeps its form, names files that exist, and is all that code cites requirements of.

docs/packages has a page for each package, and names files that exist.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("manifests", "genesis", "loader", "trainer")
PAGES = sorted((ROOT / "docs" / "packages").glob("*.md"))
_HEADING = re.compile(r"^### ([GLTPO]-[1-9]\d*) \S.*$")
_CITED = re.compile(r"\bspec ((?:[GLTPO]-\d+(?:, | and )?)+)")
_PATH = re.compile(r"`([\w./{}*-]+(?:\.py|/))`")
_BARE_NUMBER = re.compile(r"(?<![\w,.])00[0-4](?![\w,.%])")


@dataclass(frozen=True)
class Item:
    """One requirement."""

    id: str
    lines: tuple[str, ...]

    @property
    def code(self) -> list[str]:
        """Files that are said to implement it."""
        return [path for line in self.lines if line.startswith("Code: ") for path in re.findall(r"`([^`]+)`", line)]


def items() -> list[Item]:
    found: list[tuple[str, list[str]]] = []
    for line in (ROOT / "docs" / "specification.md").read_text(encoding="utf-8").splitlines():
        heading = _HEADING.match(line)
        if heading is not None:
            found.append((heading[1], []))
        elif found:
            found[-1][1].append(line)
    return [Item(name, tuple(lines)) for name, lines in found]


ITEMS = items()


def sources() -> list[Path]:
    code = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return [*code, *(ROOT / "docs").glob("*.md"), *(ROOT / "tests").rglob("*.py"), *ROOT.glob("*.md")]


def test_each_id_is_given_once_and_every_heading_is_an_item() -> None:
    assert len(ITEMS) > 100
    assert [name for name, count in Counter(item.id for item in ITEMS).items() if count > 1] == []
    text = (ROOT / "docs" / "specification.md").read_text(encoding="utf-8")
    assert text.count("\n### ") == len(ITEMS)


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.id)
def test_an_item_names_its_code_or_says_that_there_is_none(item: Item) -> None:
    assert sum(line.startswith(("Code: ", "Not built: ")) for line in item.lines) == 1
    if not any(line.startswith("Not built: ") for line in item.lines):
        assert item.code
    for path in item.code:
        assert (ROOT / path).exists(), path


def test_what_is_cited_exists() -> None:
    known = {item.id for item in ITEMS}
    cited = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in sources()
        for group in _CITED.findall(path.read_text(encoding="utf-8"))
        for name in re.findall(r"[GLTPO]-\d+", group)
    }
    assert len(cited) > 50
    assert sorted((path, name) for path, name in cited if name not in known) == []


def test_code_cites_nothing_that_a_reader_cannot_open() -> None:
    bare = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if _BARE_NUMBER.search(line)
    ]
    assert bare == []


def test_each_package_has_a_page() -> None:
    packages = {path.name for path in (ROOT / "trainer").iterdir() if (path / "__init__.py").is_file()}
    assert {page.stem for page in PAGES} == packages | {"manifests", "genesis", "loader"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_paths_that_exist(page: Path) -> None:
    top = ROOT / page.stem
    folder = top if top.is_dir() else ROOT / "trainer" / page.stem
    tests = ROOT / "tests" / folder.relative_to(ROOT)
    rooms = [folder, tests, ROOT, *(path for path in folder.iterdir() if path.is_dir())]
    named = _PATH.findall(page.read_text(encoding="utf-8"))
    assert named
    assert [path for path in named if not any((room / path).exists() for room in rooms)] == []
