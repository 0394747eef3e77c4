"""A whole swarm on this machine: its processes and their command lines, running them until it is over, how it stands.

The processes find each other by peer exchange, beginning with the drivers and the first worker of each stage, whose
ports are chosen beforehand; or, as on the internet, through seeds of a DHT. All listen on 127.0.0.1 only.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from genesis.file_lock import FileLock, FileLockedError
from trainer.errors import MalformedAnswerError, PeerUnavailableError, RpcError, TrainerError, TrainerUsageError
from trainer.monitor.config import READ_TOKEN_VARIABLE
from trainer.monitor.status import ACCOUNT_PATH, STAGES_PATH, SwarmAccount, SwarmStages
from trainer.run.swarm.tree import Child, ChildSpec, ExitStatus, ProcessTree, RestartPolicy

_HOST = "127.0.0.1"
_PROGRAM = (sys.executable, "-m", "trainer")
_READY = "  --initial-peers "  # First characters of the line in which a seed prints its address.
_FIRST_PORT, _LAST_PORT = 12_000, 32_000
"""Below the ports that Linux gives to outgoing connections (32,768 on), which may be taken a moment later."""
_PORT_TRIES = 200
_TICK_S = 0.1
_LOOK_S = 1.0  # Between two questions to the drivers, so that the last answer is close to the end of the run.
_SEED_READY_S = 90.0
_ASKED = ExitStatus(0, "asked to stop")
_LOCAL_TIMEOUT_S = 1.0  # For each wait for a driver of this machine, which answers in milliseconds unless it hangs.
_MAX_BYTES = 8 << 20
_NOT_YET = 503
AnswerT = TypeVar("AnswerT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ProcessCount:
    """Processes of a stage, or of the drivers."""

    name: str
    running: int
    wanted: int
    restarts: int


@dataclass(frozen=True, slots=True)
class SwarmSnapshot:
    """How a swarm stands; stages as the first driver that answers sees them."""

    processes: tuple[ProcessCount, ...] = ()  # Empty for a swarm whose processes are not children of this one.
    stages: SwarmStages | None = None
    account: SwarmAccount | None = None
    tokens_per_s: float = 0.0  # Of all drivers that answer.
    is_stale: bool = False  # No driver answers now; these are the last answers.


class Display(Protocol):
    """Where a swarm is shown, every so many seconds."""

    every_s: float

    def event(self, text: str) -> None:
        """Shows that something happened."""

    def show(self, snapshot: SwarmSnapshot) -> None:
        """Shows how the swarm stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSwarm:
    """The size of a swarm and the options of its processes."""

    run: Path | str  # Its file, or the address of a signed one.
    stages: tuple[str, ...]
    num_workers: int = 1  # Of each stage.
    num_drivers: int = 1
    num_whole_nodes: int = 0
    num_seeds: int = 0  # 0: peer exchange.
    keeper: str = "driver-1"  # The driver that keeps the account: it ends after the others, which settle with it.
    store: str = ""
    max_steps: int | None = None  # Like ``store`` in place of the run file's, if given.
    settings: tuple[str, ...] = ()  # ``name.name=value`` for all processes.
    program: tuple[str, ...] = _PROGRAM

    @property
    def workers(self) -> list[tuple[str, str]]:
        """Stage and name of each worker."""
        numbers = range(1, self.num_workers + 1)
        return [(stage, f"{stage}.{number}") for stage in self.stages for number in numbers]

    @property
    def port_names(self) -> list[str]:
        """Names of the ports that are needed: each process's name, and ``NAME.api`` for each with an API."""
        drivers = driver_names(self.num_drivers)
        seeds = [f"seed-{number}" for number in range(1, self.num_seeds + 1)]
        own = [*drivers, *self.whole_nodes]
        return [*seeds, *(name for _, name in self.workers), *own, *(f"{name}.api" for name in own)]

    @property
    def whole_nodes(self) -> list[str]:
        """Names of the nodes that hold the whole model."""
        return [f"whole-{number}" for number in range(1, self.num_whole_nodes + 1)]

    def describe(self) -> str:
        """Returns what is started, in one line: how many of each kind of process."""
        counts = [(self.num_seeds, "seed"), (self.num_drivers, "driver"), (self.num_whole_nodes, "whole node")]
        others = [f"{count} {name}{'' if count == 1 else 's'}" for count, name in counts if count]
        workers = "1 worker" if self.num_workers == 1 else f"{self.num_workers} workers"
        return f"starting {workers} of each of {', '.join(self.stages)}; {', '.join(others)}"


def driver_names(count: int) -> list[str]:
    """Node ids of the drivers."""
    return [f"driver-{number}" for number in range(1, count + 1)]


def free_ports(count: int) -> list[int]:
    """Different ports of `127.0.0.1` on which nobody listens now; one that is taken meanwhile ends the swarm."""
    ports: list[int] = []
    with ExitStack() as held:
        for port in random.SystemRandom().sample(range(_FIRST_PORT, _LAST_PORT), _PORT_TRIES + count):
            if len(ports) == count:
                break
            listener = held.enter_context(socket.socket())
            try:
                listener.bind((_HOST, port))
            except OSError:
                continue
            ports.append(port)
    if len(ports) < count:
        raise TrainerError(
            f"expected {count} free ports at {_HOST} between {_FIRST_PORT} and {_LAST_PORT}, found {len(ports)}"
        )
    return ports


def deal_ports(swarm: LocalSwarm) -> dict[str, int]:
    """A free port for each of `LocalSwarm.port_names`; raises what `free_ports` does."""
    names = swarm.port_names
    return dict(zip(names, free_ports(len(names)), strict=True))


def seed_spec(swarm: LocalSwarm, ports: Mapping[str, int], folder: Path, known: Sequence[str]) -> ChildSpec:
    """The next seed, of one DHT with the ``known`` ones; its key in ``folder`` keeps its address over restarts."""
    name = f"seed-{len(known) + 1}"
    command = ["seed", "--host", _HOST, "--port", str(ports[name]), "--identity", str(folder / f"{name}.id")]
    return ChildSpec(name=name, role="seed", command=(*swarm.program, *command, *_peers(known)))


def seed_address(log: str) -> str | None:
    """The address a seed has printed into its log; None: it is not ready yet."""
    for line in log.splitlines(keepends=True):
        if line.startswith(_READY) and line.endswith("\n"):
            return line.removeprefix(_READY).strip()
    return None


def swarm_specs(swarm: LocalSwarm, ports: Mapping[str, int], seeds: Sequence[str]) -> list[ChildSpec]:
    """Workers, drivers and whole nodes; ``ports`` are from `deal_ports`, ``seeds`` addresses, none: peer exchange."""
    drivers = driver_names(swarm.num_drivers)
    known = (*drivers, *(f"{stage}.1" for stage in swarm.stages))
    peers = _peers(list(seeds) or [f"{_HOST}:{ports[name]}" for name in known])
    local = [f"rpc.host={_HOST}", f"rpc.public_address={_HOST}", f"discovery.dht_host={_HOST}", *swarm.settings]
    common = ["--run", str(swarm.run), *peers, *(part for setting in local for part in ("--set", setting))]
    common += ["--store", swarm.store] if swarm.store else []
    specs = []
    for stage, name in swarm.workers:
        command = ["worker", "--stage", stage, "--node-id", name, "--port", str(ports[name]), "--no-api", *common]
        specs.append(ChildSpec(name=name, role="worker", stage=stage, command=(*swarm.program, *command)))
    for name in drivers:
        api_port = ports[f"{name}.api"]
        command = ["--node-id", name, "--pipeline", "swarm", "--port", str(ports[name])]
        command += ["--api", "--api-port", str(api_port), *common]
        command += ["--max-steps", str(swarm.max_steps)] if swarm.max_steps is not None else []
        url, is_keeper = f"http://{_HOST}:{api_port}", name == swarm.keeper
        command = [*swarm.program, *command]
        specs.append(ChildSpec(name=name, role="driver", command=tuple(command), api_url=url, ends_last=is_keeper))
    for name in swarm.whole_nodes:
        command = ["--node-id", name, "--port", str(ports[name]), "--api"]
        command += ["--api-port", str(ports[f"{name}.api"]), *common]
        command += ["--max-steps", str(swarm.max_steps)] if swarm.max_steps is not None else []
        specs.append(ChildSpec(name=name, role="whole node", command=(*swarm.program, *command)))
    return specs


def _peers(addresses: Sequence[str]) -> list[str]:
    return [part for address in addresses for part in ("--initial-peers", address)]


def run_local(
    swarm: LocalSwarm, folder: Path, policy: RestartPolicy, display: Display, stop: Callable[[], bool]
) -> ExitStatus:
    """Starts all processes, watches them, and ends all of them; returns why (asked to stop: exit code 0).

    ``folder``, for its logs and the keys of its seeds, is one swarm's at a time, else it is a `TrainerUsageError`.
    ``stop`` is asked ten times a second.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "swarm.lock")
    try:
        lock.acquire()
    except FileLockedError:
        raise TrainerUsageError(f"{folder}: another swarm runs there; give this one another --folder") from None
    with lock, ProcessTree(folder, policy, tell=display.event, asked=stop) as tree:
        status = _start(tree, swarm, folder, display, stop) or _watch(tree, display, stop)
        hint = "; Ctrl+C again kills them at once, with what they have not saved" if status is _ASKED else ""
        display.event(f"{status.reason}; ending all processes{hint}")
    failed = [] if status.exit_code else [child for child in tree.children if child.failed_to_end]
    said = [f"{child.spec.name} ended with an error: {child.last_words()}" for child in failed if not child.was_killed]
    killed = [child.spec.name for child in failed if child.was_killed]
    if killed:
        said.append(f"{', '.join(killed)} had to be killed: what was done there last may not be saved")
    return ExitStatus(1, "; ".join(said)) if said else status


def _start(
    tree: ProcessTree, swarm: LocalSwarm, folder: Path, display: Display, stop: Callable[[], bool]
) -> ExitStatus | None:
    """Starts all processes; returns a status if the swarm is over before that is done."""
    ports = deal_ports(swarm)
    display.event(swarm.describe())
    seeds: list[str] = []
    while len(seeds) < swarm.num_seeds:
        log_path = tree.add(seed_spec(swarm, ports, folder, seeds)).log_path
        deadline_s, address = time.monotonic() + _SEED_READY_S, None
        while address is None:
            time.sleep(_TICK_S)
            address = seed_address(log_path.read_text(encoding="utf-8", errors="replace"))
            if (status := _ASKED if stop() else tree.look()) is not None:
                return status
            if address is None and time.monotonic() > deadline_s:
                return ExitStatus(1, f"the seed was not ready within {_SEED_READY_S:g} s; see {log_path}")
        seeds.append(address)
    for spec in swarm_specs(swarm, ports, seeds):
        tree.add(spec)
    for seed in seeds:
        display.event(f"seed at {seed}")
    for name in swarm.whole_nodes:
        display.event(f"{name} has its page at http://{_HOST}:{ports[f'{name}.api']}/ once it is ready")
    for driver in tree.of("driver"):
        display.event(f"{driver.spec.name} answers at {driver.spec.api_url} once it is ready; logs are in {folder}")
    return None


def _watch(tree: ProcessTree, display: Display, stop: Callable[[], bool]) -> ExitStatus:
    """Shows the swarm until it is over; the last snapshot shown is the last that a driver gave.

    Where no driver answers (it begins, hangs or ends), the latest is shown, marked stale.
    """
    latest = SwarmSnapshot()
    next_look_s = next_show_s = time.monotonic() + min(_LOOK_S, display.every_s)
    status: ExitStatus | None = None
    while status is None:
        if time.monotonic() >= next_look_s:
            answering = [child for child in tree.children if child.spec.api_url and child.status == "running"]
            found = snapshot_through(child.spec.api_url for child in answering)
            if found.stages is not None or latest.stages is None:
                latest = replace(found, account=found.account or latest.account)
            else:
                latest = replace(latest, is_stale=True)
            latest = replace(latest, processes=process_counts(tree.children))
            next_look_s = time.monotonic() + _LOOK_S
        if time.monotonic() >= next_show_s:
            display.show(latest)
            next_show_s = time.monotonic() + display.every_s
        time.sleep(_TICK_S)
        status = _ASKED if stop() else tree.look()
    display.show(replace(latest, processes=process_counts(tree.children), is_stale=False))
    return status


def process_counts(children: Iterable[Child]) -> tuple[ProcessCount, ...]:
    """How many processes each stage, the drivers, the whole nodes and the seeds have."""
    groups: dict[str, list[Child]] = {}
    for child in children:
        groups.setdefault(child.spec.stage or f"{child.spec.role}s", []).append(child)
    return tuple(
        ProcessCount(name, sum(it.status == "running" for it in own), len(own), sum(it.num_restarts for it in own))
        for name, own in groups.items()
    )


def snapshot_through(api_urls: Iterable[str]) -> SwarmSnapshot:
    """What the drivers at these addresses report; one that does not answer is left out."""
    stages: SwarmStages | None = None
    account: SwarmAccount | None = None
    tokens_per_s = 0.0
    for url in api_urls:
        try:
            found = ask_stages(url, _LOCAL_TIMEOUT_S)
            tokens_per_s += found.tokens_per_s
            stages = stages or found
            account = account or ask_account(url, _LOCAL_TIMEOUT_S)
        except RpcError:
            continue  # It starts, is busy or has ended; `process_counts` tells which.
    return SwarmSnapshot((), stages, account, tokens_per_s)


def ask_stages(api_url: str, timeout_s: float = 5.0) -> SwarmStages:
    """The stages as the driver at ``http://host:port`` sees them; ``timeout_s`` is for each wait for data.

    Raises an `RpcError` if no driver answers there, and `TrainerUsageError` if the address is malformed.
    """
    found = _ask(api_url, STAGES_PATH, SwarmStages, timeout_s)
    if found is None:
        raise PeerUnavailableError(f"{api_url}: expected the stages, found that it cannot tell yet; ask again")
    return found


def ask_account(api_url: str, timeout_s: float = 5.0) -> SwarmAccount | None:
    """The account of the data; None: the driver has not heard from its keeper yet. Raises what `ask_stages` does."""
    return _ask(api_url, ACCOUNT_PATH, SwarmAccount, timeout_s)


def _ask(api_url: str, path: str, kind: type[AnswerT], timeout_s: float) -> AnswerT | None:
    url = api_url.rstrip("/") + path
    token = os.environ.get(READ_TOKEN_VARIABLE, "")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        with (
            httpx.Client(trust_env=False, timeout=timeout_s, headers=headers) as client,
            client.stream("GET", url) as answer,
        ):
            content = b""
            for part in answer.iter_bytes():
                content += part
                if len(content) > _MAX_BYTES:
                    raise MalformedAnswerError(f"{url}: expected at most {_MAX_BYTES} bytes, found more")
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise TrainerUsageError(f"--api: expected http://host:port of a driver, found {api_url!r} ({error})") from None
    except httpx.HTTPError as error:
        raise PeerUnavailableError(f"{api_url}: no driver answers ({error or type(error).__name__})") from None
    if answer.status_code == _NOT_YET:
        return None
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise MalformedAnswerError(
            f"{url}: expected the token for reading, which that driver asks for (api.read_token), found "
            f"{'another' if token else 'none'}; set {READ_TOKEN_VARIABLE}"
        )
    if answer.status_code != httpx.codes.OK:
        raise MalformedAnswerError(
            f"{url}: expected a driver's answer, found status {answer.status_code}; is that the API of a driver?"
        )
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise MalformedAnswerError(
            f"{url}: expected an answer of this release, found {place}: {first['msg']}"
        ) from None
