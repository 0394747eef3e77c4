"""What a missing extra says, and that pyproject.toml and `EXTRA_OF` mean the same."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from genesis.extras import EXTRA_OF, with_extra

_ROOT = Path(__file__).resolve().parents[2]
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_DISTRIBUTION_OF = {"grpc": "grpcio", "yaml": "pyyaml"}


def _names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~ ]", requirement, maxsplit=1)[0].lower() for requirement in requirements}


@pytest.mark.parametrize("module", EXTRA_OF)
def test_the_extra_that_is_named_brings_the_module_and_the_base_does_not(module: str) -> None:
    distribution = _DISTRIBUTION_OF.get(module, module)
    assert distribution in _names(_PROJECT["optional-dependencies"][EXTRA_OF[module]])
    assert distribution not in _names(_PROJECT["dependencies"])


def test_other_errors_are_left_alone() -> None:
    error = ModuleNotFoundError("No module named 'nowhere'", name="nowhere")
    assert with_extra(error) is error


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
def test_whoever_needs_a_missing_module_is_told_which_extra_brings_it(missing: str, command: str, extra: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; {command}"
    done = subprocess.run([sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode != 0) == bool(extra), done.stderr
    assert not extra or f"pip install 'genesis-training[{extra}]'" in done.stderr
    assert not extra or "loader" not in extra or "ModuleNotFoundError" in done.stderr
    assert "trainer" not in command or "Traceback" not in done.stderr
