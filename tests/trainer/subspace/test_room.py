from __future__ import annotations

import subprocess
import sys

import pytest


def test_naming_the_room_and_its_options_does_not_import_torch():
    program = "import sys, trainer.subspace, trainer.subspace.config; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_every_public_name_is_there():
    import trainer.subspace

    assert all(getattr(trainer.subspace, name) is not None for name in trainer.subspace.__all__)
    with pytest.raises(AttributeError, match="Superspace"):
        _ = trainer.subspace.Superspace
