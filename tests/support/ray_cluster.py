"""A Ray cluster of several machines on this one, in a process of its own that tests tell what to do, line by line.

    python -m tests.support.ray_cluster MACHINES PROCESSORS [PORT]

Says its address; then ``"kill"`` kills the raylet of the machine that joined last, with -9, and has another join, and
``"add"`` only the latter. The first machine is the one that drivers run on. PORT is for drivers from elsewhere.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.child import Child, say
from tests.support.waiting import descendants

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'genesis-training[ray]'"
)
_OBJECT_STORE_BYTES = 200 << 20
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


class RayCluster:
    """The cluster, as a test sees it."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.address: str = child.hear(300.0)["address"]

    def kill_machine(self) -> None:
        """Kills the machine that joined last, and has another join."""
        self._child.say("kill")
        self._child.hear(300.0)

    def worker_pids(self) -> list[int]:
        """Processes that do the work of tasks and actors."""
        found = []
        for pid in descendants(self._child.process.pid):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            # Not the raylet, whose arguments name a worker's program, nor an agent, with which its raylet ends.
            # With the first machine's raylet the driver would end too.
            program, *arguments = command.split(b"\0")
            is_waiting = any(argument.endswith(b"default_worker.py") for argument in arguments[:3])
            if is_waiting or (program.startswith(b"ray::") and b"Agent" not in program):
                found.append(pid)
        return sorted(found)

    def kill_worker(self, choice: float) -> bool:
        """Kills one of the processes, with -9; False if there is none."""
        pids = self.worker_pids()
        if not pids:
            return False
        try:
            os.kill(pids[int(choice * len(pids))], signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True


@contextmanager
def ray_cluster(machines: int, processors: int = 2, client_port: int = 0) -> Iterator[RayCluster]:
    before = {name: os.environ.get(name) for name in _QUIET}
    os.environ.update(_QUIET)
    try:
        child = Child("ray_cluster", str(machines), str(processors), str(client_port))
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    with child:
        yield RayCluster(child)


def _main(machines: int, processors: int, client_port: int) -> None:
    from ray.cluster_utils import Cluster

    each = {"num_cpus": processors, "object_store_memory": _OBJECT_STORE_BYTES}
    head = {**each, "include_dashboard": False}
    if client_port:
        head["ray_client_server_port"] = client_port
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(**each) for _ in range(machines - 1)]
    cluster.wait_for_nodes()
    say({"address": cluster.address})
    for line in sys.stdin:
        if json.loads(line) == "kill" and nodes:
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        nodes.append(cluster.add_node(**each))
        say({"machines": len(nodes) + 1})


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:4]))
