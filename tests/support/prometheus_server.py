"""The real Prometheus, Debian's, with promtool: installed here, or unpacked below a cache folder for the tests."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.cdn_servers import unpacked
from tests.support.s3_servers import serving


@dataclass(frozen=True, slots=True)
class Programs:
    prometheus: str
    promtool: str
    environment: Mapping[str, str]


def programs() -> Programs:
    found = {name: shutil.which(name) for name in ("prometheus", "promtool")}
    if all(found.values()):
        return Programs(str(found["prometheus"]), str(found["promtool"]), {})
    tree = unpacked("prometheus")
    return Programs(str(tree.program("prometheus")), str(tree.program("promtool")), tree.environment())


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    found = programs()
    command = ["env", *(f"{name}={value}" for name, value in found.environment.items()), found.promtool]
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False, cwd="/"
    )


@dataclass(frozen=True, slots=True)
class Prometheus:
    url: str

    def ask(self, path: str, **parameters: str) -> Any:
        with httpx.Client(trust_env=False, timeout=30.0) as client:
            answer = client.get(f"{self.url}/api/v1/{path}", params=parameters)
        content = answer.json()
        assert content["status"] == "success", f"{parameters}: {content}"
        return content["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression has now; of a scalar one without labels."""
        data = self.ask("query", query=expression)
        if data["resultType"] == "scalar":
            return [{"metric": {}, "value": data["result"]}]
        return list(data["result"])


@contextmanager
def prometheus(configuration: Mapping[str, Any]) -> Iterator[Prometheus]:
    """A server of its own with this configuration; it ends with the ``with``."""
    found = programs()
    with tempfile.TemporaryDirectory(prefix="prometheus-") as name:
        folder = Path(name)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(dict(configuration)), encoding="utf-8")

        def command(port: int) -> list[str]:
            kept = [f"{name}={value}" for name, value in found.environment.items()]
            flags = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / f'data-{port}'}"]
            flags += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
            return ["env", *kept, found.prometheus, *flags]

        with serving(command) as server:
            yield Prometheus(server.endpoint)
