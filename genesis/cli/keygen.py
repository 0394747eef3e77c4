"""``genesis keygen``: a key pair to sign manifests with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from genesis.errors import UsageError
from manifests import generate_private_key, key_id, private_key_pem, public_key_pem


def keygen_command(
    output: Annotated[
        Path, typer.Option("--output", help="Where the private key goes; the public one beside it, as PATH.pub.")
    ] = Path("~/.neuroshard/genesis-key.pem"),
) -> int:
    """Make a key pair: the private key for 'genesis populate --sign-key', the public one for 'genesis verify'."""
    private_path = output.expanduser()
    public_path = private_path.with_name(private_path.name + ".pub")
    for path in (private_path, public_path):
        if path.exists() or path.is_symlink():
            raise UsageError(f"expected no file {path}, found one; keys are never overwritten: give another --output")
    key = generate_private_key()
    _create(private_path, private_key_pem(key), 0o600)
    _create(public_path, public_key_pem(key.public_key()), 0o644)
    typer.echo(f"private key: {private_path} (keep it to yourself)")
    typer.echo(f"public key:  {public_path} (hand it out)")
    typer.echo(f"key id:      {key_id(key.public_key())}")
    return 0


def _create(path: Path, body: bytes, mode: int) -> None:
    """Writes a new file that has ``mode`` from the moment it exists, and waits until it is on the disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(descriptor)
    except OSError as error:
        raise UsageError(f"--output {path}: {error.strerror}") from None
