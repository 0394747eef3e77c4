"""Token shares of sources from what a person writes: ``NAME=SHARE,…``, or the ``sources.json`` of a store's maker.

Shares are weights of any sum. They belong to a run, not to a store: shards hold one source each, and which part of a
run each source gives is decided when they are read (`loader.stream.mixture`), so one store serves every mixture and a
run may try another without populating again.
"""

from __future__ import annotations

from pathlib import Path

from loader.errors import LoaderUsageError

Shares = tuple[tuple[str, float], ...]


def parse_shares(text: str) -> Shares:
    """Parses ``NAME=SHARE,NAME=SHARE``, or reads the file of that path.

    Raises:
        LoaderUsageError: it is neither.
    """
    if "=" not in text:
        return shares_of_file(Path(text))
    return tuple(parse_share("--shares", part) for part in text.split(","))


def parse_share(option: str, text: str) -> tuple[str, float]:
    """Parses ``NAME=SHARE``; a name alone has the share 1.

    Raises:
        LoaderUsageError: the share is no number.
    """
    name, separator, share = text.strip().partition("=")
    try:
        return name, float(share) if separator else 1.0
    except ValueError:
        raise LoaderUsageError(f"{option}: expected NAME=WEIGHT such as c4=0.3, found {text!r}") from None


def shares_of_file(path: Path) -> Shares:
    """The shares in a sources.json: of those enabled sources that have one, in their order.

    Raises:
        LoaderUsageError: the file cannot be read, is no sources.json, or has no shares.
    """
    from manifests import ContractError, SourcesFile  # Brings pydantic, which other shares do without.

    try:
        file = SourcesFile.from_json(path.expanduser().read_bytes(), name=str(path))
    except OSError as error:
        raise LoaderUsageError(f"{path}: expected a sources.json with shares, found none ({error.strerror})") from None
    except ContractError as error:
        raise LoaderUsageError(str(error)) from None
    shares = tuple(
        (source.name, source.share) for source in file.sources if source.enabled and source.share is not None
    )
    if not shares:
        raise LoaderUsageError(
            f"{path}: expected enabled sources with a 'share', found none; add \"share\": 0.8 and the like"
        )
    return shares
