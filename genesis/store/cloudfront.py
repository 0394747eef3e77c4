"""Telling CloudFront that manifest.json and tokenizer.json have changed.

Guarantees: after each publish the CDN is told, but at most once a minute (an invalidation beyond a thousand paths a
month costs money, and a populator may publish every second); the last publish is never lost, since `flush` sends what
is pending; an invalidation that fails is a warning, not an error, because the objects' own ``max-age=60`` makes the
CDN current within a minute anyway.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from manifests import MANIFEST_KEY, TOKENIZER_KEY

if TYPE_CHECKING:
    from mypy_boto3_cloudfront.client import CloudFrontClient

_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


class Invalidator:
    """Invalidates the two documents of one distribution, not too often. Safe from many threads."""

    def __init__(
        self,
        distribution_id: str,
        *,
        min_interval_s: float = 60.0,
        prefix: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Names the distribution; nothing is contacted yet.

        Args:
            distribution_id: such as ``E2EXAMPLE1``.
            min_interval_s: shortest time between two invalidations.
            prefix: the store's prefix in its bucket. A distribution may serve the bucket from its root or from there,
                so both spellings of the two paths are invalidated.
            clock: seconds, never going back.
        """
        self._distribution_id = distribution_id
        self._min_interval_s = min_interval_s
        folders = ["/", f"/{prefix.strip('/')}/"] if prefix.strip("/") else ["/"]
        self._paths = [folder + key for folder in folders for key in (MANIFEST_KEY, TOKENIZER_KEY)]
        self._clock = clock
        self._lock = threading.Lock()
        self._client: CloudFrontClient | None = None
        self._sent_at: float | None = None
        self._pending = False

    def published(self) -> None:
        """Notes a publish, and tells the CDN unless it was told within the last ``min_interval_s``."""
        with self._lock:
            self._pending = True
            if self._sent_at is None or self._clock() - self._sent_at >= self._min_interval_s:
                self._send()

    def flush(self) -> None:
        """Tells the CDN of a publish it has not been told of, however short the time; for the end of a run."""
        with self._lock:
            if self._pending:
                self._send()

    def _send(self) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        # Failed or not, the next attempt waits its turn; what failed stays pending.
        self._sent_at = self._clock()
        try:
            if self._client is None:
                self._client = _connect()
            self._client.create_invalidation(
                DistributionId=self._distribution_id,
                InvalidationBatch={
                    "Paths": {"Quantity": len(self._paths), "Items": self._paths},
                    "CallerReference": f"genesis-{uuid.uuid4()}",
                },
            )
        except (BotoCoreError, ClientError, ValueError) as error:
            logger.warning(
                "CloudFront distribution %s was not told of the new manifest, readers see it within a minute all the "
                "same: %s", self._distribution_id, error,
            )  # fmt: skip
            return
        self._pending = False
        logger.debug("invalidated %s at %s", self._paths, self._distribution_id)


def _connect() -> CloudFrontClient:
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=_TIMEOUT_S, read_timeout=_TIMEOUT_S, retries={"mode": "standard", "total_max_attempts": 3}
    )
    return boto3.session.Session().client("cloudfront", config=config)
