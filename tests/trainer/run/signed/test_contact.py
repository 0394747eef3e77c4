"""A run of members as those see it who are none: its owner, and whoever wants to join."""

from __future__ import annotations

import asyncio
import time

from tests.support.rpc_node import ask, refused, register_test_methods
from tests.support.signed_runs import OWNER, run_file, wire_of
from trainer.network.rpc import Admission, Credential, Endpoint, Identity, Peer, RpcConfig
from trainer.run.config import RunConfig, from_mapping
from trainer.run.signed import ChangeChain, SignedRun
from trainer.run.signed.contact import reached
from trainer.run.signed.files import check_config
from trainer.run.signed.sources import fetch_run

_AUTHORITY = Identity.create()


async def test_strangers_read_a_run_of_members_and_its_owner_changes_it() -> None:
    file = run_file().model_copy(update={"authorities": (_AUTHORITY.peer_id,)}).signed(OWNER)
    identity, chain = Identity.create(), ChangeChain(file)
    admission = Admission(file.name, file.authorities)
    admission.take_own(Credential.issue(_AUTHORITY, file.name, identity.peer_id, "node", None, time.time(), 600.0))
    member = Endpoint(identity, file.name, RpcConfig(host="127.0.0.1"), admission)
    register_test_methods(member)
    SignedRun(file, chain, from_mapping(RunConfig, {**file.config, "node_id": "n"})).connect(member, lambda: ())
    await member.start()
    stranger = Endpoint(Identity.create(), file.name, RpcConfig())
    try:
        with refused("credential"):
            await ask(stranger, Peer(member.peer_id, member.address, member.certificate))
        known = ChangeChain(file)
        async with reached(check_config(file, "here"), known, OWNER, (member.address,)) as contact:
            await contact.find()
            assert [node.peer.peer_id for node in contact.nodes] == [member.peer_id]
            known.offer(wire_of(file, known))
            told = await contact.tell()
            assert (told.accepted, told.refused, told.silent) == ((member.address,), (), ())
        assert chain.newest == 1
        source = f"peer://{member.address}/{file.name}#{file.owner}"
        fetched = await asyncio.to_thread(fetch_run, source)
        assert fetched is not None
        assert (fetched.file, fetched.changes) == (file, tuple(chain.newer_than({})))
    finally:
        await stranger.stop()
        await member.stop()
