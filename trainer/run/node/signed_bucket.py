"""The bucket of a run as a node without keys for it sees it: each request signed by the run's authority.

Requests come from the threads of rounds; the authority is asked in the event loop of admission, one request after the
other. What may pass (no answer, too many requests) is a store that is away, which the round tries again; a refusal is
an error of access. Addresses are bearer secrets for some minutes, so the authority is asked by https or nearby alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Final
from urllib.parse import urlsplit

from pydantic import ValidationError

from genesis.errors import StoreAccessError, StoreUnavailableError
from genesis.store.limits import RetryPolicy
from genesis.store.presigned import PresignedStore
from genesis.store.s3_presigning import BucketRequest, SignedAddress
from trainer.bucket_rounds.object_names import parse_name
from trainer.errors import RefusedError, TrainerError, TrainerUsageError
from trainer.network.rpc.dialing import is_private_host
from trainer.run.authority.messages import WantedAddress
from trainer.run.config import RunConfig
from trainer.run.node.admission import AdmissionClient
from trainer.run.node.authority_client import TEMPORARY
from trainer.run.node.loop_thread import LoopThread

_ASK_S: Final = 60.0
"""For all authorities of a run, and those that wait for their turn."""


class AuthoritySource:
    """Has the run's authority sign addresses; safe from many threads, but not from the loop's own."""

    def __init__(self, admission: AdmissionClient, loop: LoopThread) -> None:
        self._admission = admission
        self._loop = loop

    def addresses(self, requests: Sequence[BucketRequest]) -> list[SignedAddress]:
        """See `genesis.store.presigned.AddressSource`."""
        try:
            wanted = tuple(WantedAddress(**asdict(each)) for each in requests)
            reply = self._loop.run(self._admission.addresses(wanted), _ASK_S)
        except ValidationError:
            raise StoreAccessError(f"{requests[0].key[:160]}: expected the name of an object of a run") from None
        except RefusedError as error:
            text = f"the run's authority signs no address ({error.reason}): {error}"
            if error.reason in TEMPORARY or error.reason == "replayed":
                raise StoreUnavailableError(text) from None
            raise StoreAccessError(text) from None
        except TrainerError as error:
            raise StoreUnavailableError(f"no address of the run's bucket is signed: {error}") from None
        return [SignedAddress(each.url, each.headers, each.life_s) for each in reply.addresses]


def open_signed_bucket(config: RunConfig, admission: AdmissionClient, loop: LoopThread) -> PresignedStore:
    """Returns the run's bucket over signed addresses; nothing is contacted. Raises TrainerUsageError."""
    for url in config.admission.urls:
        parts = urlsplit(url)
        if parts.scheme != "https" and not is_private_host(str(parts.hostname)):
            raise TrainerUsageError(
                f"bucket.access signed: expected an authority at https://, since whoever reads a signed address on its "
                f"way can use it, found {url}"
            )
    where = config.bucket.url or "the run's bucket"
    source = AuthoritySource(admission, loop)
    return PresignedStore(where, source, policy=RetryPolicy(), is_signed=lambda key: parse_name(key) is not None)
