"""`python -m trainer authority`: serves the authority of a run; invites, allows, revokes and lists its nodes.

The commands beside serving change the authority's file and need neither its key nor its process: what they change is in
force at the next request, and a revocation is with all nodes within a minute.
"""

from __future__ import annotations

import asyncio
import json as json_module
import logging
import time
from contextlib import closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from trainer.errors import TrainerUsageError

if TYPE_CHECKING:
    from trainer.network.rpc.credential import Role
    from trainer.run.authority.addresses import BucketAddresses
    from trainer.run.authority.register import InvitationLeft

logger = logging.getLogger(__name__)

_DB = Path("~/.neuroshard/authority.sqlite")
_KEY = Path("~/.neuroshard/authority.key")

authority_app = typer.Typer(invoke_without_command=True, rich_markup_mode=None, pretty_exceptions_enable=False)

_Db = Annotated[Path, typer.Option("--db", help="File of all it knows; made if it is not there.")]
_Role = Annotated[str, typer.Option(help="node (whole model), worker (a stage), driver or monitor.")]
_MIN_KEY_DIGITS, _KEY_DIGITS = 8, 64
_PeerKey = Annotated[str, typer.Argument(metavar="PEER_KEY", help="The node's key, as 'trainer identity' prints it.")]


@authority_app.callback()
def authority_command(
    context: typer.Context,
    run: Annotated[str, typer.Option("--run", help="The run's signed file, which names this key.")] = "",
    run_name: Annotated[str, typer.Option("--run-name", help="Without a file: the nodes' run_id.")] = "",
    key: Annotated[Path, typer.Option("--key", help="File of its key; made if it is not there.")] = _KEY,
    db: _Db = _DB,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any free one.")] = 4500,
    stages: Annotated[
        int, typer.Option(min=0, help="Of the run's pipeline: workers are put where they are needed; 0: they choose.")
    ] = 0,
    life_s: Annotated[float, typer.Option(help="Seconds for which a credential is valid; renewed at half.")] = 14_400.0,
    package_digest: Annotated[
        list[str] | None,
        typer.Option(help="Digest of installed files that is admitted, 'own' for this one's; repeatable; else any."),
    ] = None,
    allow_private: Annotated[
        bool, typer.Option("--allow-private", help="Dial private addresses for requesters from anywhere.")
    ] = False,
    outbound_only: Annotated[
        bool,
        typer.Option(
            "--outbound-only", help="Admit nodes without an address: of a run whose rounds go through a bucket."
        ),
    ] = False,
    rounds: Annotated[
        str,
        typer.Option(
            help="s3://bucket/prefix of the run's rounds, for which it signs requests of members without credentials."
        ),
    ] = "",
    address_life_s: Annotated[int, typer.Option(help="Seconds for which a signed request is good.")] = 900,
    member_gb: Annotated[
        float, typer.Option(help="10^9 bytes that a member may put into the bucket in an hour.")
    ] = 64.0,
    plain: Annotated[bool, typer.Option("--plain", help="The nodes have rpc.tls=false.")] = False,
    trusted_proxy: Annotated[
        str, typer.Option(help="Address of a proxy in front, whose X-Forwarded-For is believed.")
    ] = "",
) -> None:
    """Admits nodes to a run, signs their credentials, and hands out the list of revoked ones, until it is stopped."""
    if context.invoked_subcommand is not None:
        return
    from genesis.serve.server import listen
    from trainer.model.config import stage_names
    from trainer.network.rpc.identity import load_or_create_identity
    from trainer.run.authority.app import serve
    from trainer.run.authority.cleaning import cleaning
    from trainer.run.authority.messages import package_digest as own_digest
    from trainer.run.authority.register import Register
    from trainer.run.authority.service import AuthorityConfig, AuthorityService
    from trainer.run.node.stopping import StopRequest

    identity = load_or_create_identity(key)
    if run:
        name, stages, rounds = _run_served(run, identity.peer_id, stages, rounds)
    else:
        name = _run_name(run_name)
    bucket = _bucket(rounds, name, address_life_s, member_gb)
    digests = tuple(own_digest() if each == "own" else each for each in package_digest or ())
    config = AuthorityConfig(
        stages=tuple(stage_names(stages)) if stages else (),
        life_s=life_s,
        package_digests=digests,
        outbound_only=outbound_only or bool(bucket),
        allow_private=allow_private,
        tls=not plain,
    )
    stop = StopRequest()
    with closing(Register(db.expanduser())) as register, stop.on_signals():
        register.bind(name)
        listener = listen(host, port)
        with closing(listener):
            where = f"port {listener.getsockname()[1]}"
            logger.info("authority of run %s at %s; its key is %s", name, where, identity.peer_id)
            logger.info("installed files: %s", own_digest())
            service = AuthorityService(name, identity, register, config, bucket=bucket)
            with cleaning(bucket, name, identity) if bucket is not None else nullcontext():
                asyncio.run(serve(service, listener, stop, trusted_proxy))
    logger.info("the authority has stopped")


@authority_app.command("invite")
def invite_command(
    role: _Role = "worker",
    uses: Annotated[int, typer.Option(min=1, max=1_000_000, help="Nodes that may join by it.")] = 1,
    valid_h: Annotated[float, typer.Option(min=0.001, help="Hours until it expires.")] = 168.0,
    db: _Db = _DB,
) -> None:
    """Prints a new invitation, for --token; only a hash of it is kept, so it cannot be printed again."""
    from trainer.run.authority.messages import invitation_key, new_invitation
    from trainer.run.authority.register import opened

    invitation = new_invitation()
    with opened(db.expanduser()) as register:
        register.invite(invitation_key(invitation).peer_id, _role(role), uses, time.time(), valid_h * 3600)
    typer.echo(invitation)
    typer.echo(f"for {uses} {role}{'s' if uses > 1 else ''}, valid for {valid_h:g} h; give it to --token", err=True)


@authority_app.command("invitations")
def invitations_command(
    db: _Db = _DB, json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False
) -> None:
    """Prints the invitations that were made: name, role, uses left, and for how long they are valid."""
    from trainer.run.authority.register import opened

    with opened(db.expanduser()) as register:
        invitations = register.invitations()
    if json:
        typer.echo(json_module.dumps({"invitations": [asdict(each) for each in invitations]}))
        return
    for left in invitations:
        typer.echo(_invitation_line(left, time.time()))
    if not invitations:
        typer.echo("no invitation was made", err=True)


@authority_app.command("withdraw")
def withdraw_command(
    invitation: Annotated[
        str, typer.Argument(metavar="INVITATION", help="Its name, as 'invitations' prints it, or itself (invite-…).")
    ],
    db: _Db = _DB,
) -> None:
    """Ends an invitation: nobody else joins by it. Who has joined by it stays; 'revoke' takes a node out."""
    from trainer.run.authority.messages import invitation_key, token_hash
    from trainer.run.authority.register import opened

    is_whole = invitation.startswith("invite-")
    name = token_hash(invitation_key(invitation).peer_id) if is_whole else invitation.rstrip("…").lower()
    if len(name) < 8 or set(name) - set("0123456789abcdef"):
        raise TrainerUsageError(
            f"INVITATION: expected 8 hexadecimal digits, as 'authority invitations' prints them, or one that begins "
            f"with invite-, found {invitation[:80]!r}"
        )
    with opened(db.expanduser()) as register:
        left = register.withdraw(name, time.time())
    typer.echo(f"invitation {left.name}… is withdrawn; {left.uses - left.uses_left} of {left.uses} uses were taken")


@authority_app.command("allow")
def allow_command(peer_key: _PeerKey, role: _Role = "worker", db: _Db = _DB) -> None:
    """Lets the node with this key join without an invitation."""
    from trainer.run.authority.register import opened

    with opened(db.expanduser()) as register:
        register.allow(_peer_key(peer_key), _role(role))
    typer.echo(f"{peer_key} may join as {role}")


@authority_app.command("revoke")
def revoke_command(
    peer_key: Annotated[
        str,
        typer.Argument(metavar="PEER_KEY", help="The node's key; of a member 8 digits or more, as 'list' prints it."),
    ],
    db: _Db = _DB,
    life_s: Annotated[float, typer.Option(help="Life of credentials, if the authority has another one.")] = 14_400.0,
) -> None:
    """Takes the node with this key out of the run for good; the others refuse it within a minute."""
    from trainer.run.authority.register import opened

    with opened(db.expanduser()) as register:
        if _MIN_KEY_DIGITS <= len(peer_key) < _KEY_DIGITS and not set(peer_key) - set("0123456789abcdef"):
            peer_key = register.member_key(peer_key)
        number = register.revoke(_peer_key(peer_key), time.time(), life_s)
    typer.echo(f"{peer_key} is revoked, from list {number} on")


@authority_app.command("list")
def list_command(
    db: _Db = _DB, json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False
) -> None:
    """Prints the nodes that were admitted, and what is left of invitations."""
    from trainer.run.authority.register import as_row, opened

    now = time.time()
    with opened(db.expanduser()) as register:
        members, invitations = register.members(), register.invitations()
    if json:
        rows = [as_row(each, now) for each in members]
        typer.echo(json_module.dumps({"members": rows, "invitations": [asdict(each) for each in invitations]}))
        return
    typer.echo(f"{'peer':16}  {'role':8}{'stage':9}{'state':9}{'seen':>8}{'valid':>8}  address")
    for row in (as_row(each, now) for each in members):
        state = "revoked" if row["is_revoked"] else "there" if row["is_there"] else "away"
        note = "" if row["is_reached"] else "  (not reached)"
        typer.echo(
            f"{row['peer_id'][:16]}  {row['role']:8}{row['stage'] or '-':9}{state:9}{_span(row['seen_s_ago']):>8}"
            f"{_span(max(0.0, row['valid_s'])):>8}  {row['address']}{note}"
        )
    for left in invitations:
        typer.echo(_invitation_line(left, now))


def _invitation_line(left: InvitationLeft, now: float) -> str:
    expiry = "ended" if left.expires_at <= now else f"valid for {_span(left.expires_at - now)}"
    return f"invitation {left.name}…  {left.role}: {left.uses_left} of {left.uses} uses left, {expiry}"


def _run_name(given: str) -> str:
    if not given:
        raise TrainerUsageError("--run: expected the run's file, or --run-name its name, found neither")
    return given


def _bucket(url: str, run_name: str, life_s: int, member_gb: float) -> BucketAddresses | None:
    """Returns what signs addresses of a bucket, which was probed; None: there is none."""
    if not url:
        return None
    from trainer.run.authority.addresses import AddressConfig, BucketAddresses

    if not url.startswith("s3://"):
        raise TrainerUsageError(f"--rounds: expected s3://bucket/prefix, whose requests can be signed, found {url}")
    bucket = BucketAddresses(url, run_name, AddressConfig(life_s=life_s, hourly_bytes=member_gb * 1e9))
    bucket.check()
    logger.info("signs requests to %s for members, each good for %d s", url, life_s)
    return bucket


def _run_served(source: str, key: str, stages: int, rounds: str) -> tuple[str, int, str]:
    """Returns name and number of stages of a signed run, and the bucket of which its authority signs addresses."""
    from trainer.run.signed.files import check_config
    from trainer.run.signed.sources import fetch_run

    fetched = fetch_run(source)
    if fetched is None:
        raise TrainerUsageError(f"--run {source}: expected a signed run file (run init makes one), found options")
    if key not in fetched.file.authorities:
        logger.warning(
            "%s does not name this authority's key %s: nodes believe it once the file does (run init --authority) or, "
            "in a run that names another, once a change does (run set authorities=[KEY,…])",
            fetched.where,
            key,
        )
    config = check_config(fetched.file, fetched.where)
    stages = stages or (config.swarm.num_stages if fetched.file.is_of_stages(config) else 0)
    if config.bucket.access == "signed" and not (rounds or config.bucket.url):
        raise TrainerUsageError(
            f"--rounds: expected the bucket of the run, since its nodes have their requests signed here "
            f"(bucket.access signed), and {fetched.where} does not name it; found none"
        )
    return fetched.file.name, stages, rounds or (config.bucket.url if config.bucket.access == "signed" else "")


def _role(name: str) -> Role:
    from trainer.network.rpc import credential

    roles = get_args(credential.Role)
    if name not in roles:
        raise TrainerUsageError(f"--role: expected one of {', '.join(roles)}, found {name!r}")
    return cast("Role", name)


def _peer_key(text: str) -> str:
    from trainer.network.rpc.messages import is_peer_id

    if not is_peer_id(text):
        raise TrainerUsageError(
            f"PEER_KEY: expected 64 hexadecimal digits, as 'authority list --json' has them, found {text[:80]!r}"
        )
    return text


def _span(seconds: float) -> str:
    for unit, size_s in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{seconds:.0f} s"
