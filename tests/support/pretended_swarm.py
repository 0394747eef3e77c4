"""Stands in for ``python -m trainer`` under `swarm up`: the same command lines, and nothing trained.

A seed prints an address, a worker and a whole node wait, a driver serves the two pages and is done when
``--max-steps`` are over, of 0.2 s each. All append their arguments, as a line of JSON, to the file
PRETENDED_SWARM_CALLS names. Workers of the stages in PRETENDED_SWARM_UNSAVED end with an error when they are asked to.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path

PROGRAM = (sys.executable, "-m", "tests.support.pretended_swarm")


def _drive(options: dict[str, list[str]]) -> None:
    from tests.support.observing import SeenPipeline, driver_api, some_stages

    view = SeenPipeline()
    with driver_api(view, int(options["--api-port"][0])):
        for step in range(int(options.get("--max-steps", ["100000"])[0])):
            view.of_stages = some_stages(step=step)
            time.sleep(0.2)


def _note(arguments: list[str]) -> None:
    with Path(os.environ["PRETENDED_SWARM_CALLS"]).open("a") as calls:
        calls.write(json.dumps(arguments) + "\n")


def main(arguments: list[str]) -> None:
    options: dict[str, list[str]] = {}
    for name, value in pairwise(arguments):
        if name.startswith("--"):
            options.setdefault(name, []).append(value)
    if arguments[0] == "worker":
        if options["--stage"][0] in os.environ.get("PRETENDED_SWARM_UNSAVED", "").split(","):
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"trainer: no room for {options['--node-id'][0]}"))
        _note(arguments)
        time.sleep(600)
    elif arguments[0] == "seed":
        _note(arguments)
        port = options["--port"][0]
        print("seed is ready; give nodes one of these:")  # noqa: T201
        print(f"  --initial-peers /ip4/127.0.0.1/tcp/{port}/p2p/Qm{port}", flush=True)  # noqa: T201
        time.sleep(600)
    elif "--pipeline" not in options:
        _note(arguments)
        time.sleep(600)
    else:
        _note(arguments)
        _drive(options)


if __name__ == "__main__":
    main(sys.argv[1:])
