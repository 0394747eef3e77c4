"""The table of what is shared and what may change has every option, and the page shows it whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.run.signed.fields import AUTHORITIES, STANDINGS, may_change, option_names, standing_of, table_lines

_PAGE = Path(__file__).resolve().parents[4] / "docs" / "running-a-run.md"


def test_every_option_has_a_standing_and_no_other_has() -> None:
    assert set(STANDINGS) == set(option_names())


def test_the_page_shows_the_table() -> None:
    page = _PAGE.read_text(encoding="utf-8")
    for line in table_lines():
        assert line in page, line


@pytest.mark.parametrize(
    "name",
    [
        *("swarm.stage.target_tokens", "inner.lr", "inner.schedule", "inner.decay_end_step", "diloco.inner_steps"),
        *("swarm.sparta.every_steps", "collective.gather_timeout_s", "swarm.worker.auto_step_s", "rule.rule"),
        *("collective.max_weight_ratio", "inner.max_grad_norm", AUTHORITIES),
    ],
)
def test_what_an_owner_may_change(name: str) -> None:
    assert may_change(name)


@pytest.mark.parametrize("name", ["seed", "node_id", "data.store", "model.dim", "diloco.num_fragments", "no.such"])
def test_what_nobody_changes(name: str) -> None:
    assert not may_change(name)


def test_an_option_that_the_table_lacks_is_shared() -> None:
    assert standing_of("of.an_extension") == "fixed"
