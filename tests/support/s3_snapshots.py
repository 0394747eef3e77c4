"""A store in a test server's bucket, read in this process while the server's address is in the environment."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.s3_servers import Server

__all__ = ["speaking_to"]


@contextmanager
def speaking_to(server: Server) -> Iterator[None]:
    """Sets the AWS variables of ``server`` in this process for a while."""
    before = dict(os.environ)
    os.environ.update(server.environment())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
