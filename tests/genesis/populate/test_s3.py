"""The same bytes through S3 as in a folder, with and without a network that misbehaves."""

import json

import pytest

from tests.support.fault_proxy import FAST_FAULTS, FaultProxy
from tests.support.populating import genesis, populate_arguments, snapshot
from tests.support.s3_servers import moto_s3, rclone_s3, s3_client
from tests.support.s3_snapshots import speaking_to

URL = "s3://bucket/a/prefix"


@pytest.fixture(scope="module")
def moto():
    with moto_s3("bucket", "faulty") as server:
        yield server


@pytest.mark.slow
def test_a_bucket_holds_what_a_folder_would(moto, small_input, undisturbed):
    genesis(*populate_arguments(URL, small_input), "--workers", "2", **moto.environment())
    with speaking_to(moto):
        assert snapshot(URL) == undisturbed
    client = s3_client(moto)
    shard = client.head_object(Bucket="bucket", Key="a/prefix/shard_0.pt")
    assert "immutable" in shard["CacheControl"]
    manifest = client.head_object(Bucket="bucket", Key="a/prefix/manifest.json")
    assert manifest["CacheControl"] == "public, max-age=60, must-revalidate"
    assert manifest["ContentType"] == "application/json"
    assert client.head_object(Bucket="bucket", Key="a/prefix/checkpoints.json")["CacheControl"] == "no-store"
    status = json.loads(genesis("status", "--store", URL, "--json", **moto.environment()).stdout)
    assert status
    client.close()


@pytest.mark.slow
def test_a_gateway_that_ignores_conditions_is_named(small_input, undisturbed, tmp_path):
    with rclone_s3(tmp_path, "bucket") as server:
        done = genesis(*populate_arguments("s3://bucket/s", small_input), "--workers", "1", **server.environment())
        assert "ignores conditions" in done.stderr
        with speaking_to(server):
            assert snapshot("s3://bucket/s") == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_faults_change_nothing(moto, small_input, undisturbed):
    """500, 503 SlowDown, cut connections, lost acknowledgements and late errors, two requests in five."""
    with FaultProxy(moto.port, seed=3, rate=0.4, faults=FAST_FAULTS) as proxy:
        genesis(*populate_arguments("s3://faulty/s", small_input), "--workers", "1", **moto.environment(proxy.port))
        assert all(proxy.injected[fault] for fault in FAST_FAULTS)
    with speaking_to(moto):
        assert snapshot("s3://faulty/s") == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_faults_and_kills_together_change_nothing(moto, small_input, undisturbed):
    arguments = [*populate_arguments("s3://faulty/killed", small_input), "--workers", "1"]
    points = ("vocabulary-stored:1", "shard-stored:2", "segment-stored:1", "checkpoint-stored:1")
    with FaultProxy(moto.port, seed=4, rate=0.15, faults=FAST_FAULTS) as proxy:
        environment = moto.environment(proxy.port)
        for point in points:
            genesis(*arguments, expect=-9, GENESIS_CRASH_AT=point, **environment)
        genesis(*arguments, **environment)
        assert sum(proxy.injected.values()) > 20
    with speaking_to(moto):
        assert snapshot("s3://faulty/killed") == undisturbed
