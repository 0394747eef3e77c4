"""Whether the node may take part: the run's file, and where the run names an authority, a credential of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from genesis.doctor import Finding
from genesis.doctor.findings import problem_of
from genesis.doctor.store import http_clock_offset_s, skew_finding
from genesis.errors import StoreError
from trainer.errors import AdmissionError, AdmissionRefusedError, TrainerError, TrainerUsageError
from trainer.network.rpc import Endpoint
from trainer.network.rpc.messages import Reason
from trainer.run.config.admission import AdmissionConfig
from trainer.run.node.admission import AdmissionClient
from trainer.run.signed.sources import FetchedRun

_JOIN_S: Final = 5.0
_CURES: Final = {
    "token": "ask whoever runs this run for a new invitation, and give it (--token, GENESIS_INVITATION)",
    "role": "ask for an invitation of this node's role (authority invite --role), or start it in the other role",
    "stage": "give a stage of the run (--stage), or auto",
    "package": "install the release that the run admits",
    "address": "give --public-address HOST:PORT, at which the authority reaches this machine",
    "unreachable": "open the port in firewall and router, or give the address at which it is open (--public-address)",
    "unknown": "start this node once with an invitation (--token)",
    Reason.REVOKED: "ask whoever runs this run: its authority has revoked this node's key, for good",
    Reason.CLOCK: "set the clock by NTP (timedatectl set-ntp true, or start chronyd)",
    Reason.RUN: "give that run's file (--run), or the address of this run's own authority (--authority)",
}


def run_file_finding(fetched: FetchedRun | None, *, is_given: bool) -> Finding:
    """Which run this is; that its signature holds was found when it was read."""
    if fetched is None:
        why = "the file of --run holds options, signed by nobody" if is_given else "no run file is given (--run)"
        return Finding.skipped("run", "run-file", why)
    file = fetched.file
    who = "members only" if file.authorities else "open to anybody"
    text = f"{fetched.where}: run {file.name} of owner {file.owner[:16]}…, signature holds, {who}"
    return Finding.ok("run", "run-file", text)


def run_file_failure(error: TrainerError) -> Finding:
    """That the run's file cannot be had, believed, or followed with these options."""
    text = str(error)
    if "says" in text and "this node's options" in text:
        return Finding.failed("run", "run-file", problem_of(error), "leave that option out: the run's file decides it")
    cure = "take the file, or its address with #OWNER, from where the run's owner has published it"
    return Finding.failed("run", "run-file", problem_of(error), cure)


def authority_clock_finding(config: AdmissionConfig, clock: Callable[[], float]) -> Finding:
    """How far this machine's clock is from the authority's, which refuses requests of another time."""
    for url in config.urls:
        try:
            offset_s = http_clock_offset_s(url, clock)
        except (StoreError, ValueError):
            continue
        if offset_s is not None:
            return skew_finding("run", "authority-clock", "the run's authority", offset_s)
    return Finding.skipped("run", "authority-clock", "no authority has told its time")


async def join(
    client: AdmissionClient, endpoint: Endpoint, clock: Callable[[], float], by_relay: Callable[[], Awaitable[str]]
) -> Finding:
    """Gets the node admitted, as its start would; ``by_relay`` as there where the authority does not reach it."""
    try:
        credential = await client.join(endpoint.address, elsewhere=by_relay)
    except AdmissionRefusedError as error:
        cure = _CURES.get(error.reason, "see the log of the authority")
        return Finding.failed("run", "admission", problem_of(error), cure)
    except AdmissionError as error:
        cure = "check --authority and that it runs; a node without a valid credential waits for it"
        return Finding.failed("run", "admission", problem_of(error), cure)
    except TrainerUsageError as error:
        return Finding.failed("run", "admission", problem_of(error), "give --authority URL, and --run with its key")
    left_min = (credential.expires_at - clock()) / 60
    place = f" in {credential.stage}" if credential.stage else ""
    text = f"admitted as {credential.role}{place}; the credential is valid for {left_min:.0f} min"
    if left_min <= 0:
        return Finding.failed("run", "admission", text, "set the clock, and check that the authority answers")
    return Finding.ok("run", "admission", text, valid_s=60 * left_min)


def hurried(config: AdmissionConfig) -> AdmissionConfig:
    """Returns the options with less patience for an authority that does not answer."""
    return replace(config, join_timeout_s=min(_JOIN_S, config.join_timeout_s))
