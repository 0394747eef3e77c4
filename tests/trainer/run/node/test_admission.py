"""A node's side of admission against a real authority over HTTP: joining, renewing, being revoked, doing without."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from genesis.serve.server import listen
from tests.support.authority import (
    LOCAL,
    Node,
    admitted_node,
    answering_endpoint,
    eventually,
    join_wire,
    running_authority,
)
from tests.support.rpc_node import RUN_ID, ask, refused
from trainer.errors import AdmissionError, PeerUnavailableError, RunFileError, TrainerUsageError
from trainer.network.discovery.record_kinds import revoked_key
from trainer.network.rpc import Identity
from trainer.network.rpc.credential import RevokedPeers
from trainer.run.config import RunConfig, from_mapping
from trainer.run.config.admission import AdmissionConfig
from trainer.run.config.run import CheckpointConfig
from trainer.run.node.admission import AdmissionClient, admission_client


async def test_nodes_that_were_admitted_talk_and_others_do_not(tmp_path: Path) -> None:
    async with (
        running_authority(tmp_path, stages=("head", "tail")) as authority,
        admitted_node(tmp_path, authority, stage="auto") as worker,
        admitted_node(tmp_path, authority, role="driver") as driver,
        admitted_node(tmp_path, authority, joins=False) as outsider,
    ):
        await ask(driver.endpoint, worker.endpoint.peer)
        known = driver.admission.known(worker.identity.peer_id)
        assert known is not None
        assert known.stage == worker.client.stage in ("head", "tail")
        with refused("credential"):
            await ask(outsider.endpoint, worker.endpoint.peer)
        with pytest.raises(PeerUnavailableError, match="credential"):
            await ask(worker.endpoint, outsider.endpoint.peer)


async def test_the_key_is_learnt_from_an_address_that_nobody_can_answer_for(tmp_path: Path) -> None:
    async with running_authority(tmp_path) as authority:
        identity = Identity.create()
        async with answering_endpoint(identity) as endpoint:
            config = AdmissionConfig(urls=(authority.url,), token=authority.invite())
            client = AdmissionClient(config, identity, RUN_ID, "worker", tmp_path / "it.json")
            await client.join(endpoint.address)
            assert client.admission.authorities == {authority.key}
            far = AdmissionConfig(urls=("http://authority.example.org:4500",), token=authority.invite())
            unsure = AdmissionClient(far, identity, RUN_ID, "worker", tmp_path / "other.json")
            with pytest.raises(TrainerUsageError, match="expected the key of the authority"):
                await unsure.join(endpoint.address)
            other_run = AdmissionClient(config, identity, "corpus-9", "worker", tmp_path / "third.json")
            with pytest.raises(TrainerUsageError, match="expected run 'corpus-9', found 'test-run'"):
                await other_run.join(endpoint.address)


@pytest.mark.parametrize("reason", ["token", "run", "clock"])
async def test_a_refusal_is_one_line_that_trying_again_does_not_change(tmp_path: Path, reason: str) -> None:
    async with running_authority(tmp_path) as authority:
        identity = Identity.create()
        config = AdmissionConfig(authorities=(authority.key,), urls=(authority.url,), token="")
        client = AdmissionClient(
            config,
            identity,
            "corpus-9" if reason == "run" else RUN_ID,
            "worker",
            tmp_path / "it.json",
            clock=(lambda: time.time() - 900.0) if reason == "clock" else time.time,
        )
        async with answering_endpoint(identity) as endpoint:
            with pytest.raises(TrainerUsageError, match=rf"refuses this node \({reason}\)") as caught:
                await client.join(endpoint.address)
        assert "\n" not in str(caught.value)


async def test_without_an_authority_a_newcomer_ends_and_a_member_goes_on(tmp_path: Path) -> None:
    identity = Identity.create()
    async with running_authority(tmp_path) as authority:
        async with admitted_node(tmp_path, authority, identity=identity, join_timeout_s=0.5) as node:
            first = node.admission.own
        await authority.kill()
        async with admitted_node(tmp_path, authority, identity=identity, join_timeout_s=0.5) as node:
            assert node.admission.own == first
        with pytest.raises(AdmissionError, match=r"does not answer .* check --authority"):
            async with admitted_node(tmp_path, authority, join_timeout_s=0.5):
                pass
        await authority.serve()


@pytest.mark.slow
async def test_a_node_waits_for_an_authority_that_comes_late(tmp_path: Path) -> None:
    listener = listen(LOCAL, 0)
    port = listener.getsockname()[1]
    listener.close()
    async with running_authority(tmp_path, over_http=False) as authority:
        authority.url = f"http://{LOCAL}:{port}"

        async def come_late() -> None:
            await asyncio.sleep(2.0)
            await authority.serve(port)

        coming = asyncio.create_task(come_late())
        async with admitted_node(tmp_path, authority, join_timeout_s=30.0) as node:
            assert node.admission.own is not None
        await coming


@pytest.mark.slow
async def test_renewed_while_the_authority_comes_and_goes(tmp_path: Path) -> None:
    """Credentials of eight seconds, renewed after four; three seconds without an authority stop nobody."""
    async with (
        running_authority(tmp_path, life_s=8.0) as authority,
        admitted_node(tmp_path, authority) as one,
        admitted_node(tmp_path, authority) as other,
    ):
        for node in (one, other):
            node.start()
        first = one.admission.own
        assert first is not None
        port = int(authority.url.rpartition(":")[2])
        await authority.kill()
        began = time.monotonic()
        while time.monotonic() < began + 3.0:
            await ask(one.endpoint, other.endpoint.peer)
            await asyncio.sleep(0.1)
        await authority.serve(port)
        await eventually(lambda: one.admission.own is not None and one.admission.own.expires_at > first.expires_at)
        await eventually(lambda: other.admission.own is not None and other.admission.own.expires_at > first.expires_at)
        await ask(one.endpoint, other.endpoint.peer)
        await ask(other.endpoint, one.endpoint.peer)


@pytest.mark.slow
async def test_a_revocation_reaches_nodes_that_cannot_reach_the_authority(tmp_path: Path) -> None:
    """Of seven nodes one asks the authority; the others hear of it from each other, and the revoked one is told too."""
    async with running_authority(tmp_path) as authority, AsyncExitStack() as stack:
        nodes: list[Node] = []
        for number in range(7):
            options = {"check_interval_s": 0.5 if number == 0 else 1e6}
            nodes.append(await stack.enter_async_context(admitted_node(tmp_path, authority, **options)))
        for node in nodes:
            node.peers = [other for other in nodes if other is not node]
            for other in node.peers:
                await ask(node.endpoint, other.endpoint.peer)
            node.start()
        bad = nodes[-1]
        began_s = time.monotonic()
        authority.register.revoke(bad.identity.peer_id, time.time(), 3600.0)
        for node in nodes[:-1]:
            await eventually(lambda node=node: node.admission.is_revoked(bad.identity.peer_id), 55.0)  # type: ignore[misc]
            with refused("revoked"):
                await ask(bad.endpoint, node.endpoint.peer)
            with pytest.raises(PeerUnavailableError, match="revoked"):
                await ask(node.endpoint, bad.endpoint.peer)
        assert time.monotonic() - began_s < 60.0
        await ask(nodes[1].endpoint, nodes[2].endpoint.peer)


@pytest.mark.slow
async def test_a_revocation_is_heard_of_in_the_dht(tmp_path: Path) -> None:
    """Neither node knows the other; one asks the authority, and what strangers have stored hides nothing."""
    async with (
        running_authority(tmp_path) as authority,
        admitted_node(tmp_path, authority, check_interval_s=0.2) as one,
        admitted_node(tmp_path, authority, check_interval_s=1e6) as other,
    ):
        stranger = Identity.create()
        later = RevokedPeers.issue(stranger, RUN_ID, 2**50, [one.identity.peer_id], time.time())
        kept = {stranger.peer_id: later.wire(), authority.key: later.wire()}
        one.records = other.records = {revoked_key(RUN_ID): kept}
        authority.register.revoke("1" * 64, time.time(), 3600.0)
        one.start()
        await eventually(lambda: one.admission.is_revoked("1" * 64))
        await eventually(lambda: kept[authority.key] != later.wire(), 30.0)
        other.start()
        await eventually(lambda: other.admission.is_revoked("1" * 64), 30.0)
        assert not other.admission.is_revoked(one.identity.peer_id)


async def test_a_revoked_node_is_told_and_ends(tmp_path: Path) -> None:
    async with (
        running_authority(tmp_path) as authority,
        admitted_node(tmp_path, authority, check_interval_s=0.2) as node,
    ):
        node.start()
        node.client.check()
        authority.register.revoke(node.identity.peer_id, time.time(), 3600.0)
        async with asyncio.timeout(20.0):
            with pytest.raises(AdmissionError, match="has revoked this node"):
                await node.client.failed()


async def test_nobody_ends_because_somebody_else_says_that_it_was_revoked(tmp_path: Path) -> None:
    """Another authority answers at the address, as whoever is on the way of plain HTTP may."""
    async with (
        running_authority(tmp_path) as authority,
        running_authority(tmp_path / "other", over_http=False) as other,
        admitted_node(tmp_path, authority, check_interval_s=0.2) as node,
    ):
        await authority.kill()
        other.register.revoke(node.identity.peer_id, time.time(), 3600.0)
        await other.serve(int(authority.url.rpartition(":")[2]))
        node.start()
        await eventually(lambda: other.service.refused["revoked"] >= 2)
        node.client.check()
        assert not node.admission.any_revoked
        await authority.serve()


async def test_what_was_revoked_is_known_after_a_restart_without_the_authority(tmp_path: Path) -> None:
    identity = Identity.create()
    async with running_authority(tmp_path) as authority:
        authority.register.revoke("0" * 64, time.time(), 3600.0)
        async with admitted_node(tmp_path, authority, identity=identity) as node:
            assert node.admission.is_revoked("0" * 64)
        await authority.kill()
        async with admitted_node(tmp_path, authority, identity=identity, join_timeout_s=0.5) as node:
            assert node.admission.is_revoked("0" * 64)
        await authority.serve()


async def test_any_of_several_authorities_will_do(tmp_path: Path) -> None:
    async with running_authority(tmp_path) as one, running_authority(tmp_path) as two:
        await one.kill()
        identity = Identity.create()
        keys = (one.key, two.key)
        config = AdmissionConfig(authorities=keys, urls=(one.url, two.url), token=one.invite())
        async with (
            answering_endpoint(identity) as endpoint,
            admitted_node(tmp_path, two, keys=keys) as node,
        ):
            client = AdmissionClient(config, identity, RUN_ID, "worker", tmp_path / "it.json")
            credential = await client.join(endpoint.address)
            assert credential.issuer == two.key
            credential.verify(RUN_ID, node.admission.authorities, time.time(), ())
        await one.serve()


async def test_the_service_refuses_over_http_with_a_word_a_line_and_a_status(tmp_path: Path) -> None:
    async with running_authority(tmp_path) as authority, httpx.AsyncClient(base_url=authority.url) as http:
        stranger = Identity.create()
        for body, status, reason in (
            (b"{", 400, "malformed"),
            (b"x" * 9000, 400, "malformed"),
            (join_wire(stranger, f"{LOCAL}:4100"), 403, "token"),
            (join_wire(stranger, f"{LOCAL}:4100", signer=Identity.create()), 401, "signature"),
            (join_wire(stranger, f"{LOCAL}:4100", run_name="corpus-9"), 409, "run"),
        ):
            response = await http.post("/v1/join", content=body)
            assert (response.status_code, response.json()["reason"]) == (status, reason)
            assert "\n" not in response.json()["text"]
        assert (await http.get("/v1/authority")).json() == {"run_name": RUN_ID, "issuer": authority.key}
        assert (await http.get("/docs")).status_code == 404


async def test_whoever_sends_no_body_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of requests that announce a body, on more connections than are served at once; then bodies drop by drop."""
    monkeypatch.setattr("trainer.run.authority.app._BODY_TIMEOUT_S", 0.5)
    async with running_authority(tmp_path) as authority:
        port = int(authority.url.rpartition(":")[2])
        held = []
        for _ in range(300):
            reader, writer = await asyncio.open_connection(LOCAL, port)
            writer.write(b"POST /v1/join HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{")
            held.append((reader, writer))
        told = await asyncio.gather(*(asyncio.wait_for(reader.read(4096), 20.0) for reader, _ in held))
        assert all(answer == b"" or answer.split()[1] in (b"400", b"429", b"503") for answer in told)
        assert sum(b"expected the body within" in answer for answer in told) > 100
        for _, writer in held:
            writer.close()
        await asyncio.sleep(1.0)  # Its address may ask again.
        async with httpx.AsyncClient(base_url=authority.url) as http:
            assert (await http.get("/v1/authority")).status_code == 200


async def test_requests_over_http_are_counted_by_address_before_they_are_read(tmp_path: Path) -> None:
    async with (
        running_authority(tmp_path, requests_at_once=3.0, requests_per_s=0.01) as authority,
        httpx.AsyncClient(base_url=authority.url) as http,
    ):
        found = [(await http.post("/v1/join", content=b"{")).status_code, (await http.get("/v1/authority")).status_code]
        found += [(await http.post("/v1/check", content=b"{")).status_code for _ in range(3)]
        assert found == [400, 200, 400, 429, 429]
        assert (await http.get("/v1/authority")).status_code == 429


async def test_a_worker_has_a_credential_for_the_stage_it_moves_to_before_it_moves(tmp_path: Path) -> None:
    identity = Identity.create()
    async with running_authority(tmp_path, stages=("head", "tail")) as authority:
        async with admitted_node(tmp_path, authority, identity=identity, stage="head") as node:
            await node.client.prepare_move(node.endpoint.address, "tail")
            assert node.admission.own is not None
            assert node.admission.own.stage == "head", "it holds that until it has left"
        await authority.kill()
        async with admitted_node(tmp_path, authority, identity=identity, stage="tail", join_timeout_s=0.5) as node:
            assert node.admission.own is not None
            assert node.admission.own.stage == "tail"
            with pytest.raises(PeerUnavailableError, match="does not answer"):
                await node.client.prepare_move(node.endpoint.address, "head")
        # Without an authority there is no way into another stage.
        with pytest.raises(AdmissionError, match="does not answer"):
            async with admitted_node(tmp_path, authority, identity=identity, stage="head", join_timeout_s=0.5):
                pass
        await authority.serve()


async def test_a_run_that_says_no_address_of_its_authority_has_the_node_ask_for_one(tmp_path: Path) -> None:
    config = AdmissionConfig(authorities=("0" * 64,), token="")
    client = AdmissionClient(config, Identity.create(), RUN_ID, "worker", tmp_path / "it.json")
    with pytest.raises(TrainerUsageError, match="--authority: expected the address"):
        await client.join(f"{LOCAL}:4100")


def _config(**admission: object) -> RunConfig:
    return from_mapping(RunConfig, {"node_id": "it", "admission": admission})


def test_a_run_without_an_authority_has_no_admission() -> None:
    assert admission_client(_config(), Identity.create(), "node") is None
    assert admission_client(_config(authorities=["0" * 64]), Identity.create(), "node") is not None


def test_a_monitor_of_a_signed_run_needs_no_copy_of_it_on_the_disk(tmp_path: Path) -> None:
    config = replace(
        _config(authorities=["0" * 64]), run_digest="ab" * 32, checkpoint=CheckpointConfig(directory=str(tmp_path))
    )
    assert admission_client(config, Identity.create(), "monitor") is not None
    with pytest.raises(RunFileError, match="start with --run"):
        admission_client(config, Identity.create(), "node")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"authorities": ["abc"]}, "admission.authorities: expected 64 hexadecimal digits"),
        ({"urls": ["authority.example.org"]}, "--authority: expected an address such as"),
        ({"urls": ["https://user:secret@example.org"]}, "--authority"),
        ({"join_timeout_s": 0}, "admission.join_timeout_s"),
        ({"bandwidth_mbit": -1}, "admission.bandwidth_mbit"),
    ],
)
def test_options_that_make_no_sense_are_told(options: dict[str, object], said: str) -> None:
    with pytest.raises(TrainerUsageError, match=said):
        _config(**options)


def test_an_invitation_is_in_no_text_of_the_configuration() -> None:
    config = _config(token="invite-secret")
    assert "secret" not in repr(config)
