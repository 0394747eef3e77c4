"""`python -m trainer seed`: a bootstrap peer, and with ``--relay`` a relay, for anybody or one run's members."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

import typer

from trainer.errors import TrainerUsageError

if TYPE_CHECKING:
    from trainer.network.rpc.admission import Admission

logger = logging.getLogger(__name__)

_OF_RELAYS = ("relay_port", "relay_first_port", "relay_mbit", "run", "run_name", "authority_key")


def seed_command(
    context: typer.Context,
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 4001,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    public_host: Annotated[str, typer.Option(help="Address others reach this machine at, behind a router.")] = "",
    identity: Annotated[str, typer.Option(help="File of its key; with it the address stays the same.")] = (
        "~/.neuroshard/seed.id"
    ),
    initial_peers: Annotated[list[str] | None, typer.Option(help="Addresses of other seeds.")] = None,
    relay: Annotated[
        bool, typer.Option("--relay", help="Also carry connections to nodes that cannot be reached (docs/relays.md).")
    ] = False,
    relay_port: Annotated[int, typer.Option(help="Port at which such nodes register.")] = 4002,
    relay_first_port: Annotated[
        int, typer.Option(help="Lowest of the 64 ports to lend to them, to be opened in a firewall; 0: any free ones.")
    ] = 0,
    relay_mbit: Annotated[float, typer.Option(help="Mbit/s for all of them together; 0: no bound.")] = 0.0,
    run: Annotated[str, typer.Option("--run", help="Relay for members of this signed run only: its file.")] = "",
    run_name: Annotated[str, typer.Option(help="The same without a file: the nodes' run_id.")] = "",
    authority_key: Annotated[
        list[str] | None, typer.Option(help="The same without a file: key of an authority of the run; repeatable.")
    ] = None,
) -> None:
    """Runs a bootstrap peer: holds no model, forwards announcements; run two, either may be down."""
    from trainer.network.discovery import SeedConfig, seed
    from trainer.network.relay import Relay, RelayConfig
    from trainer.run.node.ports import require_free_port

    if not relay:
        _refuse_without_relay(context)
    require_free_port("--port", host, port)
    if relay and relay_port == port != 0:
        raise TrainerUsageError(f"--relay-port: expected another port than --port, found {port} for both")
    if relay:
        require_free_port("--relay-port", host, relay_port)
    members = _relayed_members(run, run_name, authority_key or []) if relay else None
    config = SeedConfig(
        port=port, host=host, public_host=public_host, identity_path=identity, initial_peers=tuple(initial_peers or ())
    )
    relaying = RelayConfig(
        port=relay_port,
        host=host,
        public_host=public_host,
        first_port=relay_first_port,
        bytes_per_s=relay_mbit * 1e6 / 8,
    )

    def on_ready(addresses: tuple[str, ...]) -> None:
        typer.echo("seed is ready; give nodes one of these:")
        for address in addresses:
            typer.echo(f"  --initial-peers {address}")
        if relay:
            reached = public_host or ("THIS-HOST" if host in ("0.0.0.0", "::") else host)
            whom = "nodes" if members is None else f"members of run {members.run_name}"
            typer.echo(f"{whom} that cannot be reached add:\n  --relay {reached}:{relay_port}")

    seed(config, on_ready, Relay(relaying, members) if relay else None, members)


def _refuse_without_relay(context: typer.Context) -> None:
    """Raises TrainerUsageError for an option that says how to relay, where nothing is to be relayed."""
    given = [name for name in _OF_RELAYS if _is_given(context, name)]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise TrainerUsageError(f"{names}: expected --relay with it, found none; add it, or leave {names} out")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _relayed_members(run: str, run_name: str, authority_keys: list[str]) -> Admission | None:
    """Returns by what a relay knows the members of its run; None: it relays for anybody.

    Raises:
        TrainerUsageError: the options contradict each other or are incomplete, or ``run`` is no signed run file.
        RunFileError: the file cannot be had, or is not what its owner has signed.
    """
    from trainer.network.rpc.admission import Admission
    from trainer.network.rpc.messages import is_peer_id
    from trainer.run.signed.chain import ChangeChain
    from trainer.run.signed.sources import fetch_run

    if run and (run_name or authority_keys):
        raise TrainerUsageError("--run: expected no --run-name and no --authority-key beside it, which it says itself")
    if run:
        fetched = fetch_run(run)
        if fetched is None:
            raise TrainerUsageError(f"--run {run}: expected a signed run file (run init makes one), found options")
        chain = ChangeChain(fetched.file)
        chain.add_all(fetched.changes, fetched.where)
        keys: tuple[str, ...] = chain.newest_authorities()
        if not keys:
            logger.warning("%s names no authority: this relay carries for anybody", fetched.where)
            return None
        return Admission(fetched.file.name, keys)
    if bool(run_name) != bool(authority_keys):
        raise TrainerUsageError("--run-name, --authority-key: expected both or neither (or --run FILE), found one")
    for key in authority_keys:
        if not is_peer_id(key):
            raise TrainerUsageError(f"--authority-key: expected 64 hexadecimal digits, found {key[:80]!r}")
    return Admission(run_name, authority_keys) if run_name else None
