"""How a member of a benchmark talks to it: a request a line on standard input, an answer a line on standard output.

A member is started as ``python scripts/baselines/trainer/X_member.py``. A request is ``{"do": NAME, ...}``; with
``"at"``, a time of ``time.monotonic``, which all processes of a machine share, the member waits for that moment, so
that all members begin at once. A member ends with its standard input, or with the benchmark's process.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Handler = Callable[..., dict[str, Any]]

_PR_SET_PDEATHSIG = 1


def serve(handlers: Mapping[str, Handler]) -> None:
    """Answers requests until there are no more.

    What an answer is made of besides the handler's: ``began_s`` and ``ended_s`` of ``time.monotonic``, and the
    processor seconds of this process and those of its children that have ended.
    """
    logging.basicConfig(level=os.environ.get("BENCH_LOG", "WARNING"), format="%(asctime)s %(process)d %(message)s")
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # Whatever else prints is not an answer.
    for line in sys.stdin:
        request = json.loads(line)
        handler, at_s = handlers[request.pop("do")], request.pop("at", None)
        if at_s is not None:
            time.sleep(max(0.0, at_s - time.monotonic()))
        began_s, cpu_s = time.monotonic(), time.process_time()
        answer = handler(**request)
        ended_s = time.monotonic()
        answer |= {"began_s": began_s, "ended_s": ended_s, "cpu_s": time.process_time() - cpu_s}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    sys.stdout.flush()
    os._exit(0)  # Peers' helper processes and threads do not all end by themselves.
