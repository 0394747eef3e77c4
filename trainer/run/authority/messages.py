"""What a node and an authority say to each other over HTTP, invitations, and the digest of the installed files.

Every request is signed by the node's key, so the connection needs no TLS: nothing in it is secret. An invitation is the
seed of an ed25519 key. It never crosses the wire: a request carries that key's public half and its signature, and the
authority stores a hash of the public half, from which nobody can join.

The digest of files (`package_digest`) tells honest nodes with another release from those with this one. It is computed
by the program that it is about: a program that was changed can send any digest it likes.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from manifests.serialisation import canonical_json
from trainer.errors import RefusedError, TrainerUsageError
from trainer.network.rpc.credential import (
    Credential,
    PeerKey,
    RelayPass,
    RevokedPeers,
    Role,
    RunName,
    SignatureHex,
    StageOfRun,
    UnixTime,
)
from trainer.network.rpc.envelope import first_line, parse_strict_json
from trainer.network.rpc.identity import Identity, verify_signature
from trainer.network.rpc.messages import Message, Reason

JOIN_PATH: Final = "/v1/join"
CHECK_PATH: Final = "/v1/check"
INFO_PATH: Final = "/v1/authority"
ADDRESSES_PATH: Final = "/v1/bucket"
RELAY_PATH: Final = "/v1/relay-pass"
MAX_REQUEST_BYTES: Final = 16 << 10
MAX_ADDRESSES: Final = 32
"""Of the bucket that one request asks for."""
INVITATION_PREFIX: Final = "invite-"

_JOIN_DOMAIN: Final = b"genesis join 1\n"
_CHECK_DOMAIN: Final = b"genesis check 1\n"
_ADDRESSES_DOMAIN: Final = b"genesis bucket addresses 1\n"
_SEED_BYTES: Final = 32
_PACKAGES: Final = ("manifests", "genesis", "loader", "trainer")

RequestT = TypeVar("RequestT", bound=Message)


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("expected printable characters")
    return value


_Text = Annotated[str, Field(max_length=128), AfterValidator(_printable)]
_Address = Annotated[str, Field(max_length=262), AfterValidator(_printable)]
_Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class JoinRequest(Message):
    """A node asks for a credential, its first or a newer one."""

    protocol: Literal[1] = 1
    run_name: RunName
    peer_id: PeerKey
    role: Role
    stage: StageOfRun | Literal["", "auto"] = ""
    """Of a worker: the one it holds or wants; ``auto``: where the authority puts it."""
    address: _Address
    """``host:port`` at which the authority is to find this key."""
    device: _Text = ""
    memory_bytes: Annotated[int, Field(ge=0, lt=2**53)] = 0
    bandwidth_mbit: Annotated[float, Field(ge=0, lt=1e9)] = 0.0  # As its operator says; 0: not said.
    version: _Text = ""  # Of the installed package.
    package_digest: Annotated[str, Field(pattern=r"^(|[0-9a-f]{64})$")] = ""
    token_key: Annotated[str, Field(pattern=r"^(|[0-9a-f]{64})$")] = ""
    """Public key of the invitation; empty for those that are admitted already, or on the allow-list."""
    nonce: _Nonce
    sent_at: UnixTime


class SignedJoin(Message):
    """A request with the signatures of the node's key and, where there is one, of the invitation's."""

    request: JoinRequest
    signature: SignatureHex
    token_signature: Annotated[str, Field(pattern=r"^(|[0-9a-f]{128})$")] = ""


class CheckIn(Message):
    """A node says that it is there, and asks for a newer list of revoked peers than the one it knows."""

    run_name: RunName
    peer_id: PeerKey
    stage: StageOfRun | Literal[""] = ""
    known: Annotated[dict[PeerKey, Annotated[int, Field(ge=0, lt=2**53)]], Field(max_length=16)]
    """The number of the list that it has of each authority."""
    sent_at: UnixTime


class SignedCheckIn(Message):
    """A check-in with the signature of the node's key."""

    request: CheckIn
    signature: SignatureHex


class WantedAddress(Message):
    """A request to the run's bucket that a member wants signed (`genesis.store.s3_presigning.BucketRequest`)."""

    kind: Literal["get", "list", "put", "delete"]
    key: Annotated[str, Field(max_length=256), AfterValidator(_printable)]
    after: Annotated[str, Field(max_length=256), AfterValidator(_printable)] = ""
    size_bytes: Annotated[int, Field(ge=0, lt=2**40)] = 0
    if_absent: bool = True


class AddressRequest(Message):
    """A member asks for addresses of the run's bucket; ``sent_at`` grows from one of its requests to the next."""

    run_name: RunName
    peer_id: PeerKey
    wanted: Annotated[tuple[WantedAddress, ...], Field(min_length=1, max_length=MAX_ADDRESSES)]
    sent_at: UnixTime


class SignedAddressRequest(Message):
    """A request for addresses with the signature of the node's key."""

    request: AddressRequest
    signature: SignatureHex


class BucketAddress(Message):
    """One presigned request; whoever has it can make it until its life is over."""

    url: Annotated[str, Field(max_length=8192), AfterValidator(_printable)]
    headers: Annotated[tuple[tuple[_Text, _Text], ...], Field(max_length=8)]
    life_s: Annotated[float, Field(gt=0, le=7 * 86_400)]


class AddressReply(Message):
    """The addresses, one for each that was wanted, in that order."""

    addresses: Annotated[tuple[BucketAddress, ...], Field(max_length=MAX_ADDRESSES)]


class JoinReply(Message):
    """An admitted node's credential, and the list of revoked peers if there is one."""

    credential: Credential
    revoked: RevokedPeers | None = None


class RelayPassReply(Message):
    """What a node that may join shows relays, so that the authority can dial it back by way of one."""

    relay_pass: RelayPass


class CheckInReply(Message):
    """The list of revoked peers, where it is newer than what the node knows."""

    revoked: RevokedPeers | None = None


class AuthorityInfo(Message):
    """Which run an authority admits to, and by which key."""

    run_name: RunName
    issuer: PeerKey


class Refusal(Message):
    """Why the authority says no: one word for programs, one line for people."""

    reason: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")]
    text: Annotated[str, Field(max_length=1000), AfterValidator(_printable)]
    revoked: RevokedPeers | None = None
    """The newest list, where the reason is that the sender is revoked: nobody has to believe that without one."""


def new_invitation() -> str:
    """Returns a new invitation: whoever has it may join."""
    return INVITATION_PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(_SEED_BYTES)).decode().rstrip("=")


def invitation_key(invitation: str) -> Identity:
    """Returns the key pair of an invitation; raises TrainerUsageError, which does not repeat it, where it is none."""
    try:
        if not invitation.startswith(INVITATION_PREFIX):
            raise ValueError
        seed = base64.b64decode(invitation.removeprefix(INVITATION_PREFIX) + "=", altchars=b"-_", validate=True)
        return Identity.of(Ed25519PrivateKey.from_private_bytes(seed))
    except ValueError:
        raise TrainerUsageError(
            f"--token: expected an invitation as 'authority invite' prints it ({INVITATION_PREFIX}…), found something "
            f"else of {len(invitation)} characters; was it cut short in copying?"
        ) from None


def token_hash(token_key: str) -> str:
    """Returns what is stored of an invitation."""
    return hashlib.sha256(bytes.fromhex(token_key)).hexdigest()


def sign_join(request: JoinRequest, identity: Identity, token: Identity | None) -> bytes:
    """Returns the wire form of a join request."""
    content = _content(request)
    signed = _JOIN_DOMAIN + canonical_json(content)
    token_signature = "" if token is None else token.sign(signed).hex()
    envelope = {"request": content, "signature": identity.sign(signed).hex(), "token_signature": token_signature}
    return canonical_json(envelope)


def sign_check_in(request: CheckIn, identity: Identity) -> bytes:
    """Returns the wire form of a check-in."""
    content = _content(request)
    signature = identity.sign(_CHECK_DOMAIN + canonical_json(content)).hex()
    return canonical_json({"request": content, "signature": signature})


def sign_address_request(request: AddressRequest, identity: Identity) -> bytes:
    """Returns the wire form of a request for addresses."""
    content = _content(request)
    signature = identity.sign(_ADDRESSES_DOMAIN + canonical_json(content)).hex()
    return canonical_json({"request": content, "signature": signature})


def parse_request(kind: type[RequestT], wire: bytes) -> RequestT:
    """Reads a request, whose signatures are not checked yet; raises RefusedError (``malformed``)."""
    if len(wire) > MAX_REQUEST_BYTES:
        raise RefusedError("malformed", f"expected at most {MAX_REQUEST_BYTES} bytes, found {len(wire)}")
    try:
        parse_strict_json(wire)
        return kind.model_validate_json(wire)
    except (ValidationError, ValueError, RecursionError) as error:
        raise RefusedError("malformed", f"expected a {kind.__name__}, found {first_line(error)}") from None


def check_join_signatures(signed: SignedJoin) -> None:
    """Checks that the node's key and the invitation's have signed; raises RefusedError (``signature``)."""
    request = signed.request
    message = _JOIN_DOMAIN + canonical_json(_content(request))
    if not verify_signature(request.peer_id, message, bytes.fromhex(signed.signature)):
        raise RefusedError(Reason.SIGNATURE, f"expected a signature by {request.peer_id[:16]}…, found another")
    if request.token_key and not verify_signature(request.token_key, message, bytes.fromhex(signed.token_signature)):
        raise RefusedError("token", "expected a signature by the invitation's key, found another")


def check_check_in_signature(signed: SignedCheckIn) -> None:
    """Checks that the node's key has signed; raises RefusedError (``signature``)."""
    message = _CHECK_DOMAIN + canonical_json(_content(signed.request))
    if not verify_signature(signed.request.peer_id, message, bytes.fromhex(signed.signature)):
        raise RefusedError(Reason.SIGNATURE, f"expected a signature by {signed.request.peer_id[:16]}…, found another")


def check_address_request_signature(signed: SignedAddressRequest) -> None:
    """Checks that the node's key has signed; raises RefusedError (``signature``)."""
    message = _ADDRESSES_DOMAIN + canonical_json(_content(signed.request))
    if not verify_signature(signed.request.peer_id, message, bytes.fromhex(signed.signature)):
        raise RefusedError(Reason.SIGNATURE, f"expected a signature by {signed.request.peer_id[:16]}…, found another")


@cache
def package_digest() -> str:
    """Returns the SHA-256 over names and contents of the Python files that are installed (30 ms, then kept)."""
    root = Path(__file__).resolve().parents[3]
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root).as_posix().encode()
            body = hashlib.sha256(path.read_bytes()).digest()
            digest.update(len(name).to_bytes(4, "little") + name + body)
    return digest.hexdigest()


def _content(request: BaseModel) -> dict[str, Any]:
    content: dict[str, Any] = request.model_dump(mode="json")
    return content
