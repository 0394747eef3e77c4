"""docs/packages has a page for each package, and names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs" / "packages").glob("*.md"))
_PATH = re.compile(r"`([\w./{}*-]+(?:\.py|/))`")


def folder_of(page: Path) -> Path:
    """The package a page is about."""
    top = ROOT / page.stem
    return top if top.is_dir() else ROOT / "trainer" / page.stem


def test_each_package_has_a_page() -> None:
    packages = {path.name for path in (ROOT / "trainer").iterdir() if (path / "__init__.py").is_file()}
    assert {page.stem for page in PAGES} == packages | {"manifests", "genesis", "loader"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_paths_that_exist(page: Path) -> None:
    folder = folder_of(page)
    tests = ROOT / "tests" / folder.relative_to(ROOT)
    rooms = [folder, tests, ROOT, *(path for path in folder.iterdir() if path.is_dir())]
    named = _PATH.findall(page.read_text(encoding="utf-8"))
    assert named
    assert [path for path in named if not any((room / path).exists() for room in rooms)] == []
