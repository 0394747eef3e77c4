"""Helper processes of the learner: ``python -m genesis.tokenizer.helper JOB``, a request in, an answer out.

Why a program and not multiprocessing: it works from a script without ``if __name__ == "__main__"``, from a notebook
and from a thread; its memory and its threads are gone with it; and a helper that is killed is an error with its signal
in it, never a pool that waits. Starting one takes 0.1 s.

Guarantees: an answer is whole or `WorkerError` is raised; a helper outlives neither the call nor, by more than the job
in hand, the process that started it. Request and answer are counted byte strings over pipes: nothing is unpickled.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO

from genesis.errors import WorkerError

HELPER_TIMEOUT_S = 3600.0
"""How long a helper may take; 10,000 documents take seconds, a gigabyte of text some two minutes."""

_LENGTH_BYTES = 8
_COMPLAINT_LINES = 100
_LISTENER_S = 10.0


def pack(strings: Sequence[bytes]) -> bytes:
    """One byte string that holds all of ``strings``: how many, their lengths, their bytes; 64-bit, native order."""
    lengths = array("Q", [len(strings), *map(len, strings)])
    return b"".join([lengths.tobytes(), *strings])


def unpack(data: bytes) -> list[bytes]:
    """The inverse of `pack`.

    Raises:
        WorkerError: ``data`` is not a whole packed list.
    """
    count = int.from_bytes(data[:_LENGTH_BYTES], sys.byteorder)
    start = _LENGTH_BYTES * (1 + count)
    if len(data) < max(start, _LENGTH_BYTES):
        raise WorkerError(f"expected the lengths of {count} strings in an answer, found {len(data)} bytes")
    lengths = array("Q", data[_LENGTH_BYTES:start])
    ends = list(accumulate(lengths, initial=start))
    if ends[-1] != len(data):
        raise WorkerError(f"expected an answer of {ends[-1]} bytes, found {len(data)}")
    return [data[begin:end] for begin, end in pairwise(ends)]


def run_helper(
    job: str,
    request: Sequence[bytes],
    *,
    num_threads: int = 1,
    timeout_s: float = HELPER_TIMEOUT_S,
    on_line: Callable[[bytes], None] = lambda line: None,
) -> list[bytes]:
    """Runs one job in a process of its own. Blocks; several may run at once from several threads.

    Args:
        job: its name, a key of `_JOBS`.
        request: what it is to work on.
        num_threads: threads the tokenizers library may use in it.
        timeout_s: deadline; the helper is killed then.
        on_line: told each line it writes to its standard error, from another thread.

    Raises:
        WorkerError: it was killed, failed, or took too long.
    """
    with _start(job, num_threads) as process:
        complaint = deque[bytes](maxlen=_COMPLAINT_LINES)
        errors, process.stderr = process.stderr, None  # Read here, or `communicate` would keep it to the end.
        listener = threading.Thread(target=_listen, args=(errors, complaint, on_line), daemon=True)
        listener.start()
        try:
            answer, _ = process.communicate(pack(request), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise WorkerError(f"learning: the {job} process took more than {timeout_s:.0f} s and was stopped") from None
        finally:
            # Whatever happened, a deadline or Ctrl-C: no helper is left behind. On one that ended this does nothing.
            process.kill()
        listener.join(_LISTENER_S)
    if process.returncode:
        raise WorkerError(f"learning: the {job} process {_ending(process.returncode, complaint)}")
    return unpack(answer)


def _listen(errors: IO[bytes] | None, complaint: deque[bytes], on_line: Callable[[bytes], None]) -> None:
    if errors is None:
        return
    with errors:
        for line in errors:
            complaint.append(line)
            on_line(line)


def _start(job: str, num_threads: int) -> subprocess.Popen[bytes]:
    # -P: the search path is this process's, without whatever the working folder holds.
    command = [sys.executable, "-P", "-m", "genesis.tokenizer.helper", job]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(num_threads),
        )
    except OSError as error:
        raise WorkerError(f"learning: cannot start {sys.executable!r}: {error.strerror}") from None


def _environment(num_threads: int) -> dict[str, str]:
    search_path = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    return os.environ | {
        "PYTHONPATH": search_path,
        "RAYON_NUM_THREADS": str(num_threads),
        "TOKENIZERS_PARALLELISM": "true" if num_threads > 1 else "false",
    }


def _ending(returncode: int, complaint: Iterable[bytes]) -> str:
    if returncode < 0:
        name = signal.Signals(-returncode).name
        hint = "; if memory ran out, learn from fewer documents" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    lines = [text for line in complaint if (text := line.decode(errors="replace").rstrip())] or ["it said nothing"]
    return f"failed with status {returncode}: {lines[-1]}"


def _merge(request: list[bytes]) -> list[bytes]:
    from genesis.tokenizer.learning import SEPARATOR, learn_pairs, single_threaded_after

    words, counts, symbols, num_merges, min_frequency = request
    pairs = learn_pairs(
        words.decode().split(SEPARATOR),
        array("Q", counts),
        symbols.decode(),
        int(num_merges),
        int(min_frequency),
        after_feeding=single_threaded_after,
        tell_progress=True,
    )
    return [side.encode() for pair in pairs for side in pair]


_JOBS: Mapping[str, Callable[[list[bytes]], list[bytes]]] = {"merge": _merge}


def main() -> None:
    """Reads a request, does the job named on the command line, writes the answer."""
    # Ctrl-C and the end of a terminal reach all its processes; whether to stop is for the one that started this one.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    answer = _JOBS[sys.argv[1]](unpack(sys.stdin.buffer.read()))
    sys.stdout.buffer.write(pack(answer))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
