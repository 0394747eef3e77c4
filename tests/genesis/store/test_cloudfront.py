"""Invalidations, against moto's CloudFront and a clock that the test sets."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from genesis.store.cloudfront import Invalidator
from tests.support.s3_servers import boto3_client, free_port


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def cloudfront(moto, s3_env) -> Iterator[Any]:
    s3_env(moto)
    client = boto3_client(moto, "cloudfront")
    yield client
    client.close()


@pytest.fixture
def distribution(cloudfront: Any) -> str:
    origin = {"Id": "o", "DomainName": "bucket.s3.amazonaws.com", "S3OriginConfig": {"OriginAccessIdentity": ""}}
    created = cloudfront.create_distribution(
        DistributionConfig={
            "CallerReference": uuid.uuid4().hex,
            "Comment": "",
            "Enabled": True,
            "Origins": {"Quantity": 1, "Items": [origin]},
            "DefaultCacheBehavior": {"TargetOriginId": "o", "ViewerProtocolPolicy": "allow-all"},
        }
    )
    name: str = created["Distribution"]["Id"]
    return name


def sent(cloudfront: Any, distribution: str) -> list[list[str]]:
    listed = cloudfront.list_invalidations(DistributionId=distribution)["InvalidationList"].get("Items", [])
    got = [cloudfront.get_invalidation(DistributionId=distribution, Id=item["Id"])["Invalidation"] for item in listed]
    return [sorted(one["InvalidationBatch"]["Paths"]["Items"]) for one in got]


@pytest.mark.slow
def test_at_most_once_a_minute_and_the_last_is_not_lost(cloudfront, distribution):
    clock = Clock()
    invalidator = Invalidator(distribution, clock=clock)
    counts = []
    for now in (100, 101, 159.9, 160, 161, 300):
        clock.now = now
        invalidator.published()
        counts.append(len(sent(cloudfront, distribution)))
    assert counts == [1, 1, 1, 2, 2, 3]
    invalidator.flush()
    assert len(sent(cloudfront, distribution)) == 3, "nothing was pending"
    clock.now = 301
    invalidator.published()
    invalidator.flush()
    invalidator.flush()
    assert sent(cloudfront, distribution) == [["/manifest.json", "/tokenizer.json"]] * 4


@pytest.mark.slow
def test_a_store_below_a_prefix(cloudfront, distribution):
    Invalidator(distribution, prefix="data/v1/").published()
    both = ["/data/v1/manifest.json", "/data/v1/tokenizer.json", "/manifest.json", "/tokenizer.json"]
    assert [sorted(paths) for paths in sent(cloudfront, distribution)] == [both]


@pytest.mark.slow
def test_nothing_published_nothing_sent(cloudfront, distribution):
    Invalidator(distribution).flush()
    assert sent(cloudfront, distribution) == []


@pytest.mark.slow
def test_a_failure_is_a_warning_and_stays_pending(cloudfront, distribution, moto, monkeypatch, caplog):
    clock = Clock()
    invalidator = Invalidator(distribution, clock=clock)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with caplog.at_level(logging.WARNING, "genesis"):
        invalidator.published()
    assert [distribution in record.getMessage() for record in caplog.records] == [True]
    assert sent(cloudfront, distribution) == []
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.endpoint)
    Invalidator("NOSUCHID").published()
    assert len(caplog.records) == 2


@pytest.mark.slow
def test_what_failed_is_sent_later(cloudfront, distribution, monkeypatch):
    invalidator = Invalidator(distribution)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    invalidator.published()
    monkeypatch.delenv("AWS_PROFILE")
    invalidator.flush()
    assert len(sent(cloudfront, distribution)) == 1
