"""Words of workers are theirs; what a driver counts, settles and writes down is its own."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from trainer.errors import RefusedError
from trainer.network.rpc import Reason
from trainer.pipeline.driver.results import verdict_of
from trainer.pipeline.protocol.work import LossReason


@pytest.mark.parametrize("word", ["0", "-x", "_", "", "hop-", "a" * 48, "no-such-word"])
def test_a_word_that_nobody_knows_is_one_of_ours(word: str) -> None:
    verdict = verdict_of(RefusedError(word, "a worker's text"))
    assert (verdict.reason, verdict.effect, verdict.blame) == ("refused", "unclear", "ban")


@pytest.mark.parametrize("word", ["busy", "no-input", "already-applied", "malformed", "nonfinite", *map(str, Reason)])
def test_every_word_that_is_known_can_be_why_a_micro_batch_was_lost(word: str) -> None:
    verdict = verdict_of(RefusedError(word, "a worker's text"))
    assert verdict.reason == word
    assert TypeAdapter(LossReason).validate_python(verdict.reason) == word
