"""Which processes a whole swarm on one machine consists of, and their command lines; starts none of them.

They find each other by peer exchange, beginning with the drivers and the first worker of each stage, whose ports are
chosen beforehand; or, as on the internet, through seeds of a DHT. Nobody else can reach them: all listen on 127.0.0.1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.run.swarm.children import ChildSpec

__all__ = ["HOST", "LocalSwarm", "Ports", "driver_names", "seed_address", "seed_spec", "swarm_specs"]

HOST = "127.0.0.1"
_PROGRAM = (sys.executable, "-m", "trainer")
_READY = "  --initial-peers "
"""How the line begins in which a seed prints its address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSwarm:
    """How large it is, and what its processes are told."""

    run: Path
    """Run file."""
    stages: tuple[str, ...]
    num_workers: int = 1
    """Of each stage."""
    num_drivers: int = 1
    num_seeds: int = 0
    """0: peer exchange."""
    keeper: str = "driver-1"
    """The driver that keeps the account: it ends behind the others, which settle with it."""
    store: str = ""
    """In the place of the run file's; empty: that."""
    max_steps: int | None = None
    """In the place of the run file's; None: that."""
    settings: tuple[str, ...] = ()
    """``name.name=value`` for all processes."""
    program: tuple[str, ...] = _PROGRAM

    @property
    def num_ports(self) -> int:
        """How many are needed."""
        return self.num_seeds + self.num_workers * len(self.stages) + 2 * self.num_drivers


@dataclass(frozen=True, slots=True)
class Ports:
    """Who listens where."""

    seeds: tuple[int, ...]
    workers: dict[str, int]
    """By worker's name."""
    drivers: dict[str, int]
    apis: dict[str, int]
    """Of drivers."""

    @classmethod
    def dealt(cls, swarm: LocalSwarm, ports: Sequence[int]) -> Ports:
        """Gives each its own of `LocalSwarm.num_ports` ports."""
        free = iter(ports)
        drivers = driver_names(swarm.num_drivers)
        return cls(
            seeds=tuple(next(free) for _ in range(swarm.num_seeds)),
            workers={name: next(free) for _, name in _workers(swarm)},
            drivers={name: next(free) for name in drivers},
            apis={name: next(free) for name in drivers},
        )


def driver_names(count: int) -> list[str]:
    """Node ids of so many drivers."""
    return [f"driver-{number}" for number in range(1, count + 1)]


def seed_spec(swarm: LocalSwarm, ports: Ports, folder: Path, known: Sequence[str]) -> ChildSpec:
    """The next seed.

    Args:
        swarm: the whole.
        ports: who listens where.
        folder: where its key is, with which its address stays the same when it is started again.
        known: addresses of the seeds before, by which the seeds become one DHT.
    """
    number = len(known) + 1
    name = f"seed-{number}"
    command = ["seed", "--host", HOST, "--port", str(ports.seeds[number - 1]), "--identity", str(folder / f"{name}.id")]
    return ChildSpec(name=name, role="seed", command=(*swarm.program, *command, *_peers(known)))


def seed_address(log: str) -> str | None:
    """The address a seed has printed into its log; None: it is not ready yet."""
    for line in log.splitlines(keepends=True):
        if line.startswith(_READY) and line.endswith("\n"):
            return line.removeprefix(_READY).strip()
    return None


def swarm_specs(swarm: LocalSwarm, ports: Ports, seeds: Sequence[str]) -> list[ChildSpec]:
    """Workers and drivers.

    Args:
        swarm: the whole.
        ports: who listens where.
        seeds: addresses of its seeds; none: peer exchange.
    """
    first_workers = [ports.workers[f"{stage}.1"] for stage in swarm.stages]
    addresses = list(seeds) or [f"{HOST}:{port}" for port in (*ports.drivers.values(), *first_workers)]
    return [
        *(_worker(swarm, stage, name, ports, addresses) for stage, name in _workers(swarm)),
        *(_driver(swarm, name, ports, addresses) for name in ports.drivers),
    ]


def _workers(swarm: LocalSwarm) -> list[tuple[str, str]]:
    """Stage and name of each."""
    return [(stage, f"{stage}.{number}") for stage in swarm.stages for number in range(1, swarm.num_workers + 1)]


def _worker(swarm: LocalSwarm, stage: str, name: str, ports: Ports, addresses: Sequence[str]) -> ChildSpec:
    command = ["worker", "--stage", stage, "--node-id", name, "--run", str(swarm.run), "--port"]
    command += [str(ports.workers[name]), *_peers(addresses), *_settings(swarm), "--no-api"]
    command += ["--store", swarm.store] if swarm.store else []
    return ChildSpec(name=name, role="worker", stage=stage, command=(*swarm.program, *command))


def _driver(swarm: LocalSwarm, name: str, ports: Ports, addresses: Sequence[str]) -> ChildSpec:
    api_port = ports.apis[name]
    command = ["--node-id", name, "--run", str(swarm.run), "--pipeline", "swarm", "--port", str(ports.drivers[name])]
    command += ["--api", "--api-port", str(api_port), *_peers(addresses), *_settings(swarm)]
    command += ["--store", swarm.store] if swarm.store else []
    command += ["--max-steps", str(swarm.max_steps)] if swarm.max_steps is not None else []
    return ChildSpec(
        name=name,
        role="driver",
        command=(*swarm.program, *command),
        api_url=f"http://{HOST}:{api_port}",
        ends_last=name == swarm.keeper,
    )


def _peers(addresses: Sequence[str]) -> list[str]:
    return [part for address in addresses for part in ("--initial-peers", address)]


def _settings(swarm: LocalSwarm) -> list[str]:
    local = [f"rpc.host={HOST}", f"rpc.public_address={HOST}", f"discovery.dht_host={HOST}", *swarm.settings]
    return [part for setting in local for part in ("--set", setting)]
