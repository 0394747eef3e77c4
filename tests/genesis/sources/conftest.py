from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import huggingface_hub
import pytest

from genesis.sources import parquet
from tests.support.hub_server import HubServer, hub_server


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., HubServer]]:
    """Serves a folder as the Hub that this process's client talks to."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(parquet, "_open_files", parquet._OpenFiles())
    with ExitStack() as stack:

        def start(folder: Path, **options: object) -> HubServer:
            hub = stack.enter_context(hub_server(folder, **options))
            monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.endpoint)
            return hub

        yield start
    huggingface_hub.close_session()
