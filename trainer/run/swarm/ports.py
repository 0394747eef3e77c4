"""Free ports of this machine, chosen before those who are to listen on them are started."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

from trainer.errors import TrainerError

__all__ = ["free_ports"]

_FIRST, _LAST = 12_000, 32_000
"""Below those that kernels hand out to whoever connects (32,768 on, Linux): those may be gone a moment later."""
_TRIES = 200


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """So many ports nobody listens on, all different.

    Nothing keeps others from taking one before it is used; whoever then cannot listen says so and ends the swarm.

    Raises:
        TrainerError: there are too few.
    """
    ports: list[int] = []
    with ExitStack() as held:
        for port in random.SystemRandom().sample(range(_FIRST, _LAST), _TRIES + count):
            if len(ports) == count:
                break
            listener = held.enter_context(socket.socket())
            try:
                listener.bind((host, port))
            except OSError:
                continue
            ports.append(port)
    if len(ports) < count:
        raise TrainerError(f"expected {count} free ports at {host} between {_FIRST} and {_LAST}, found {len(ports)}")
    return ports
