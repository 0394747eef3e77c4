"""Signed runs of made-up owners, and changes of them, right and wrong."""

from __future__ import annotations

import time
from typing import Any

from trainer.network.discovery.records import sign_record
from trainer.network.discovery.run_change import RunChange
from trainer.network.rpc.identity import Identity
from trainer.run.config import RunConfig, from_mapping, merged
from trainer.run.signed import ChangeChain, RunFile

OWNER = Identity.create()
SMALL = {"run_id": "corpus-8", "model": {"preset": "tiny"}, "data": {"store": "/data/store"}}


def run_file(owner: Identity = OWNER, **options: Any) -> RunFile:
    """A signed run, of ``options`` as configuration files have them over `SMALL`."""
    config = from_mapping(RunConfig, merged(SMALL, options))
    return RunFile.of(config, owner.peer_id).signed(owner)


def change_of(file: RunFile, chain: ChangeChain | None = None, **fields: Any) -> RunChange:
    """The next change of a run, but for the ``fields`` given."""
    known = chain or ChangeChain(file)
    content = {
        "run_id": file.name,
        "signer": file.owner,
        "number": known.newest + 1,
        "issued_at": time.time(),
        "previous": known.previous_digest(),
        "at_round": 5,
        "settings": {"inner.lr": 2e-4},
    }
    return RunChange(**(content | fields))


def wire_of(file: RunFile, chain: ChangeChain | None = None, signer: Identity = OWNER, **fields: Any) -> bytes:
    """A change signed by its owner, whoever that is."""
    return sign_record(change_of(file, chain, **({"signer": signer.peer_id} | fields)), signer)


def chain_of(file: RunFile, *at_rounds: int) -> ChangeChain:
    """A run's changes: number n sets the learning rate to n * 1e-4."""
    chain = ChangeChain(file)
    for number, at_round in enumerate(at_rounds, 1):
        chain.offer(wire_of(file, chain, at_round=at_round, settings={"inner.lr": number * 1e-4}))
    return chain
