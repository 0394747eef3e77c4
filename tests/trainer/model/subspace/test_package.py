from __future__ import annotations

import importlib
import subprocess
import sys

import pytest


def test_naming_the_packages_and_its_options_does_not_import_torch():
    program = (
        "import sys, trainer.compression.activations, trainer.model.subspace.config; sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


@pytest.mark.parametrize("name", ["trainer.compression.activations", "trainer.model.subspace"])
def test_every_public_name_is_there(name: str) -> None:
    package = importlib.import_module(name)

    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="Superspace"):
        _ = package.Superspace
