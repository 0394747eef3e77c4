"""Settings of all tests.

Hypothesis does not time examples: the machine is shared, and a slow example is no failure. Its examples are the same in
every run, so that a failure can be had again.

``--begin-within-s`` keeps a run within a time: a test that has not begun by then is skipped. The order of files is then
drawn from the commit, so that the skipped ones are others at the next commit.

A test that is a coroutine runs in an event loop of its own (`on_event_loop`).

A shell starts what it runs in the background with SIGINT ignored, nohup ignores SIGHUP, and processes inherit that. It
is taken back here, or the processes under test would not hear the signals that they are sent.
"""

from __future__ import annotations

import gc
import inspect
import random
import signal
import subprocess
import time

import pytest
from hypothesis import HealthCheck, settings

from tests.support.event_loop import on_event_loop

# By default what four minutes allow; `--hypothesis-profile thorough` looks at eight times as many.
for _profile, _examples in (("genesis", 25), ("thorough", 200)):
    settings.register_profile(
        _profile,
        deadline=None,
        derandomize=True,
        max_examples=_examples,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
    )
settings.load_profile("genesis")

_BEGUN_S = time.monotonic()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--begin-within-s", type=float, help="skip the tests that have not begun after so many seconds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--begin-within-s") is not None:
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout
        places = {path: random.Random(f"{head} {path}").random() for path in {item.path for item in items}}
        items.sort(key=lambda item: places[item.path])


def pytest_collection_finish() -> None:
    """Spares the collection behind each coroutine every imported module and collected test: half a second of each."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    within_s = item.config.getoption("--begin-within-s")
    if within_s is not None and time.monotonic() - _BEGUN_S > within_s:
        pytest.skip(f"not begun within {within_s:.0f} s")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        pyfuncitem.obj = on_event_loop(pyfuncitem.obj)
