"""Joining a Ray cluster, or making one of this machine alone for the while of a run.

Ray's own output is kept from the user's terminal, the signal handlers stay the caller's, and what is made here is gone
with the run.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray

from genesis.errors import GenesisError, UsageError, WorkerError
from genesis.populate.options import PopulateOptions

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 10.0
_STORE_BYTES_PER_SLOT = 256 << 20
"""Of the object store, in a cluster of this machine alone; memory is only taken as it is used."""
_SHORT_TEMPORARY = "/tmp" if Path("/tmp").is_dir() else None
"""Not TMPDIR: the names of Ray's sockets, below it, may have 107 characters."""


@contextmanager
def connected(options: PopulateOptions) -> Iterator[None]:
    """Joins the cluster, or one that is made for the while; where the caller has joined one, that is used."""
    if ray.is_initialized():
        yield
        return
    with ExitStack() as stack:
        quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
        arguments: dict[str, Any] = {"address": options.ray_address, **quiet}
        if options.ray_address == "local":
            folder = Path(tempfile.mkdtemp(prefix="genesis-ray-", dir=_SHORT_TEMPORARY))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            arguments |= {
                "num_cpus": options.num_workers,
                "include_dashboard": False,
                "object_store_memory": (options.num_workers + 2) * _STORE_BYTES_PER_SLOT,
                "_temp_dir": str(folder),
            }
            stack.enter_context(_environment_of_processes())
        _check_listens(options.ray_address)
        with _own_signal_handlers():
            try:
                ray.init(**arguments)
            except Exception as error:  # Ray raises many kinds, some of them plain exceptions.
                logger.debug("joining the cluster", exc_info=True)
                raise _no_cluster(options.ray_address, error) from None
        stack.callback(ray.shutdown)
        yield


def _check_listens(address: str) -> None:
    """Asks first whether anybody listens there: Ray itself would try for minutes.

    Raises:
        UsageError: nobody does.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, error) from None


def _no_cluster(address: str, error: Exception) -> GenesisError:
    if address == "local":
        return WorkerError(f"Ray did not start on this machine ({first_line(error)}); run the same command again")
    return UsageError(
        f"--address {address}: expected a Ray cluster that runs, found none ({first_line(error)}); start one with "
        "'ray start --head', or use --address local"
    )


@contextmanager
def _environment_of_processes() -> Iterator[None]:
    """What the processes of a cluster of this machine inherit: this process's search path, and no reports to Ray."""
    search_path = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    ours = {
        "PYTHONPATH": search_path,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Puts the caller's handlers back: Ray's would end the process without a commit.

    What Ray starts meanwhile inherits that SIGHUP is ignored: a cluster of this machine would else die with the
    terminal, before the commit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Callable[..., Any] | int | None] = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def first_line(error: BaseException) -> str:
    """What went wrong, without the pages that Ray adds."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
