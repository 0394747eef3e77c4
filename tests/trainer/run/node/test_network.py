"""A node's state among others: which of theirs it takes up, and what it does not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.announcements import announcement
from tests.support.round_actor import identity_of
from tests.support.trainer_command import TrainerCommand
from tests.support.training_swarm import free_port
from tests.support.waiting import wait_until
from trainer.collective import Terms
from trainer.errors import IncompatiblePeerError
from trainer.model import ModelConfig, build_model
from trainer.network.discovery import Announcement, DiscoveryConfig
from trainer.network.rpc import Identity, RpcConfig
from trainer.network.transfer import StateConfig, describe
from trainer.network.transfer.descriptor import Meta
from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer, SharedState
from trainer.outer.engine.collective import LocalCollective
from trainer.run.config import RunConfig
from trainer.run.node.identity import NodeStats
from trainer.run.node.network import Network
from trainer.run.node.peer_book import PeerBook
from trainer.run.node.state_form import StateFit, state_layout

SHAPE = ModelConfig(vocab_size=1024, dim=8, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=16, max_seq_len=16)
FIT = StateFit(SHAPE, 1, max_bytes=1 << 24)
TERMS = Terms(architecture={"dim": 8}, tokenizer_lineage="ab" * 32, synchronisation={"seed": 1})
VECTORS = ("anchor", "momentum", "reference")
QUICK = {"announce_interval_s": 0.2, "poll_interval_s": 0.1, "max_retry_interval_s": 1.0}
WAIT_S = 30.0


def state(outer_step: int = 3, rows: int = 1024, **changes: object) -> SharedState:
    """One that fits, but for the changes."""
    layout = state_layout(replace(SHAPE, vocab_size=rows), 1)
    vectors = dict.fromkeys(VECTORS, torch.full((layout.num_values,), float(outer_step)))
    numbers = {"outer_step": outer_step, "num_inner_steps": 7 * outer_step, "vocab_rows": rows}
    return replace(SharedState(**numbers, **vectors, layout_digest=layout.digest()), **changes)


def packed(shared: SharedState) -> tuple[Meta, Mapping[str, torch.Tensor]]:
    found = FIT.pack(shared)
    assert found is not None
    return found


class Listening:
    """Hears that others can fetch a state; in the event loop's thread, which a test may hold up."""

    def __init__(self) -> None:
        self.news = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.others: tuple[Announcement, ...] = ()

    def progress(self) -> NodeStats:
        return NodeStats()

    def peers(self, announcements: tuple[Announcement, ...]) -> None:
        self.others = announcements

    def state(self, outer_step: int, digest: str, part: str = "") -> None:
        self.news.set()
        assert self.go_on.wait(WAIT_S)


Begin = Callable[[str], tuple[Network, Listening]]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Starts nodes that look for others at the addresses of those before them."""
    addresses: list[str] = []
    with ExitStack() as stack:

        def start(name: str) -> tuple[Network, Listening]:
            port = free_port()
            network, listening = network_of(name, tmp_path / name, addresses, port), Listening()
            network.start(listening)
            stack.callback(network.stop)
            addresses.append(f"127.0.0.1:{port}")
            return network, listening

        yield start


def network_of(name: str, folder: Path, initial_peers: list[str], port: int, terms: Terms = TERMS) -> Network:
    config = RunConfig(
        node_id=name,
        run_id="test",
        state_dir=str(folder),
        rpc=RpcConfig(host="127.0.0.1", port=port, public_address="127.0.0.1", stop_grace_s=0.1),
        discovery=DiscoveryConfig(initial_peers=tuple(initial_peers), **QUICK),
        state=StateConfig(retry_pause_s=0.05),
    )
    return Network(config, Identity.create(), terms, lambda: 1024, FIT, lambda: False)


def test_a_node_with_the_same_id_is_told_once(begin: Begin, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def told() -> list[str]:
        return [it.getMessage() for it in caplog.records if "is called same too" in it.getMessage()]

    for name in ("same", "other", "same"):
        begin(name)
    wait_until(lambda: len(told()) == 2, "both tell of each other")
    _, listening = begin("last")
    wait_until(lambda: len(listening.others) == 3, "all known")
    assert len(told()) == 2


@pytest.mark.slow
def test_only_a_state_that_fits_is_taken(begin: Begin, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They claim to be further, and would be taken first; the model of the first would not fit into any memory."""
    short = torch.zeros(8)
    offered = {
        "vast": state(9, vocab_rows=2**40, anchor=short, momentum=short, reference=short),
        "other": state(8, layout_digest="cd" * 32),
        "honest": state(3),
    }
    for name, shared in offered.items():
        network, _ = begin(name)
        network.publish(shared)
        network.settle(WAIT_S)
    newcomer, listening = begin("newcomer")
    wait_until(lambda: len([it for it in listening.others if it.state_digest]) == 3, "three states announced")
    for _ in range(2):
        taken = newcomer.catch_up(wait_s=WAIT_S)
        assert taken is not None
        assert taken.digest() == offered["honest"].digest()
    told = [record.getMessage() for record in caplog.records if "does not fit this node" in record.message]
    assert len(told) == 2
    assert "found one of 1099511627776" in told[0]
    assert "expected the layout" in told[1]
    fetched = {path.name for path in (tmp_path / "newcomer" / "state" / "test" / "newcomer").iterdir()}
    assert fetched == {it.state_digest for it in listening.others if it.outer_step == 3}


@pytest.mark.slow
@pytest.mark.parametrize("step", ["expectation", "unpack"])
def test_a_state_that_nobody_foresaw_is_passed_over_and_ends_no_node(begin, caplog, monkeypatch, step):
    holder, held = begin("a")
    holder.publish(state())
    assert held.news.wait(WAIT_S)
    newcomer, _ = begin("b")

    def unforeseen(*_: object) -> None:
        raise RuntimeError("no such storage")

    monkeypatch.setattr(StateFit, step, unforeseen)
    assert newcomer.catch_up(wait_s=3.0) is None
    said = [record.getMessage() for record in caplog.records if "does not fit this node" in record.getMessage()]
    assert len(said) == 1 and "no such storage" in said[0]


@pytest.mark.slow
def test_a_node_that_is_asked_to_stop_waits_for_no_state(begin: Begin, caplog: pytest.LogCaptureFixture) -> None:
    donor, donors = begin("donor")
    donor.publish(state(3))
    donor.settle(WAIT_S)
    newcomer, listening = begin("newcomer")
    wait_until(lambda: any(it.state_digest for it in listening.others), "a state announced")
    donors.news.clear()
    donors.go_on.clear()
    donor.publish(state(4))
    assert donors.news.wait(WAIT_S)  # From now on the donor hangs.
    asked = iter([False])
    try:
        assert newcomer.catch_up(wait_s=WAIT_S, stop=lambda: next(asked, True)) is None
    finally:
        donors.go_on.set()
    assert not [record for record in caplog.records if record.levelname == "WARNING"], "it gave up by itself"


@pytest.mark.slow
def test_a_node_that_is_stopped_while_it_looks_for_others_saves_and_leaves(trainer: TrainerCommand) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    with trainer.running("--node-id", "a", "--initial-peers", nobody, "--set", "rpc.host=127.0.0.1") as node:
        wait_until(lambda: "answers at" in "".join(node.errors), "the node to look for others", WAIT_S)
        assert node.stop() == 143
    assert "answers yet" not in "".join(node.errors)
    assert trainer.saved("a")["training_rounds"] == 0


def test_a_state_fits_with_any_full_number_of_rows_and_its_layout_is_that_of_a_built_model() -> None:
    for rows in (1024, 5 * 1024):
        shared = state(rows=rows)
        tensors = FIT.expectation(describe(*packed(shared))).tensors
        assert tensors == dict.fromkeys(VECTORS, ("float32", (shared.anchor.numel(),)))
    shape = replace(SHAPE, num_layers=3, vocab_size=2048)
    shared = DiLoCoTrainer(build_model(shape, 0), DiLoCoConfig(num_fragments=2), LocalCollective()).shared_state()
    layout = state_layout(shape, 2)
    assert (layout.digest(), layout.num_values) == (shared.layout_digest, shared.anchor.numel())


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ({"vocab_rows": 0}, "rows of vocabulary"),
        ({"vocab_rows": 1025}, "in steps of 1024"),
        ({"vocab_rows": 10_001_408}, "rows of vocabulary"),
        ({"vocab_rows": 2048}, "layout"),
        ({"fragment": 1}, "fragment"),
        ({"outer_step": 2**53}, "outer_step"),
        ({"layout_digest": "cd" * 32}, "layout"),
        ({"version": 2}, "version 1"),
    ],
)
def test_a_descriptor_of_another_state_is_refused(meta: dict[str, int | str], said: str) -> None:
    fits, tensors = packed(state())
    with pytest.raises(IncompatiblePeerError, match=said):
        FIT.expectation(describe({**fits, **meta}, tensors))


@pytest.mark.parametrize(
    "tensors",
    [
        {"anchor": torch.zeros(8)},
        dict.fromkeys(VECTORS, torch.zeros(8)),
        dict.fromkeys(VECTORS, torch.zeros(state().anchor.shape).half()),
        {},
    ],
)
def test_tensors_of_another_state_are_refused(tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(IncompatiblePeerError, match="expected a state of anchor, momentum, reference with"):
        FIT.expectation(describe(packed(state())[0], tensors))
    with pytest.raises(IncompatiblePeerError, match="at most 1000 bytes"):
        replace(FIT, max_bytes=1000).expectation(describe(*packed(state())))


STATES = [f"{number:x}" * 64 for number in range(8)]


@pytest.mark.parametrize(
    ("held", "announced", "adopted", "elsewhere"),
    [
        ((1, 2), [(1, 1), (1, 1)], 1, None),  # Nodes that are only behind do not draw this one back.
        ((1, 2, 3, 4), [(2, 7), (2, 7)], 7, 7),  # It went on alone, and sees where most others are.
        ((4,), [(2, 7)], None, None),  # One other node with another state is no majority.
    ],
)
def test_which_state_most_others_hold(held, announced, adopted, elsewhere):
    """States are numbers; those held were held after the outer step of the same number."""
    book = PeerBook(TERMS.digest())
    for step in held:
        book.hold(step, STATES[step])
    others = [{"outer_step": step, "state_digest": STATES[state]} for step, state in announced]
    terms = TERMS.digest()
    book.update(tuple(announcement(identity_of(n), terms_digest=terms, **each) for n, each in enumerate(others, 1)))
    assert book.state_to_adopt() == (None if adopted is None else STATES[adopted])
    assert book.state_elsewhere() == (None if elsewhere is None else STATES[elsewhere])
