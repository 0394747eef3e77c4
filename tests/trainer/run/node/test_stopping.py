"""A request to stop: by signal or by a call, once or again."""

from __future__ import annotations

import os
import signal
import time

import pytest

from trainer.run.node import StopRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0)  # Lets the interpreter run the handler.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_and_is_remembered(number: int) -> None:
    before = signal.getsignal(number)
    stop = StopRequest()
    with stop.on_signals():
        assert not stop()
        send(number)
        assert (stop(), stop.signal) == (True, number)
        send(signal.SIGTERM)  # Again, as an init system may: what is being saved is not given up for it.
        assert stop.signal == number
    assert signal.getsignal(number) is before


def test_an_impatient_second_interrupt_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    stop = StopRequest()
    with stop.on_signals():
        send(signal.SIGINT)
        now_s = 100.5
        send(signal.SIGINT)  # torchrun's copy of the first.
        now_s = 102.0
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_a_call_asks_without_a_signal() -> None:
    stop = StopRequest()
    stop.ask()
    assert (stop(), stop.signal) == (True, None)
