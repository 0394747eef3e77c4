"""How a command line ends and what it imports; and shards into the cache, again, in part, with losses, and stopped."""

import signal
import subprocess
import sys

import pytest

from loader import get_assigned_shards
from manifests import generate_private_key, packed_key, public_key_pem, sha256_hex, shard_key
from tests.loader.cli.conftest import ROOT, LoaderCommand
from tests.support.fault_proxy import FaultProxy, Reply
from tests.support.small_store import PRIVATE_KEY, SHARD_TOKENS, copy_small_store, manifest_of, segment_of
from tests.support.waiting import wait_until


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "Usage: python -m loader"),
        ("plan", "expected --node-id ID, found none"),
        ("plan --node-id \udcff", "in UTF-8"),
        ("plan --nodes-from /nowhere", "--nodes-from /nowhere: No such file"),
        ("plan --node-id a --source alpha=x", "expected NAME=WEIGHT"),
        ("plan --node-id a --source gamma", "(alpha, beta), found 'gamma'"),
        ("plan --node-id a --shares alpha=x,beta=1", "--shares: expected NAME=WEIGHT"),
        ("plan --node-id a --shares alpha=1 --source beta", "expected --shares or --source, found both"),
        ("plan --node-id a --shares /nowhere", "/nowhere: expected a sources.json with shares, found none"),
        ("plan --node-id a --holdout 99", "expected shards to read"),
        ("plan --node-id a --total-shards 24", "expected at most 23"),
        ("plan --node-id a --verify 3,x", "--verify: expected whole numbers"),
        ("plan --node-id a --node-id b --verify 3", "expected one --node-id, found 2"),
        ("plan --node-id a --cache-bytes 20G", "expected a size such as 20GB"),
        ("plan --node-id a --public-key /nowhere", "--public-key /nowhere: No such file"),
        ("plan --node-id a --mirror ftp://nowhere", "ftp"),
        ("verify", "expected --node-id ID"),
        ("verify --all --node-id a", "expected --all or --node-id"),
        ("verify --node-id a --claim 00", "expected --replay STEP"),
        ("verify --node-id a --replay 0 --claim 00", "expected 64 hexadecimal digits"),
    ],
)
def test_wrong_usage_ends_with_two(line, said, here):
    assert said in "".join(here(*(line.split(" ") if line else []), expect=2))


@pytest.mark.slow
@pytest.mark.parametrize("store", ["/nowhere/at/all", "http://127.0.0.1:9/store"])
def test_a_store_that_is_not_there_ends_with_one(store, tmp_path):
    done = LoaderCommand(store, tmp_path)("plan", "--node-id", "a", "--timeout-s", "0.5", expect=1, GENESIS_LOG="ERROR")
    assert done.stdout == ""
    assert done.stderr.startswith("loader: ") and store in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_pinned_key_is_held_against_the_store(here, tmp_path):
    copy_small_store(tmp_path / "signed", signed=True)
    for name, key, code in (("right", PRIVATE_KEY, 0), ("wrong", generate_private_key(), 1)):
        (tmp_path / name).write_bytes(public_key_pem(key.public_key()))
        store, pinned = tmp_path / "signed", tmp_path / name
        out, errors = here("plan", "--node-id", "a", "--store", store, "--public-key", pinned, expect=code)
        assert (out == "") == (name == "wrong")
        assert ("loader: " in errors) == (name == "wrong")


def test_mirrors_and_caches_that_keep_nothing(here, store):
    done = here.json("fetch", "--node-id", "a", "--store", store.parent / "gone", "--mirror", store)
    assert len(done["fetched"]) == 10
    done = here.json("fetch", "--node-id", "n", "--jobs", "1", "--cache-dir", "/dev/null", expect=1)
    assert [failure["shard_id"] for failure in done["failed"]] == SHARDS[:1]
    assert done["not_begun"] == SHARDS[1:]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plan", "fetch", "verify"])
def test_torch_is_not_imported_where_it_is_not_needed(command, loader):
    script = (
        "import sys\nfrom loader.cli.app import run\n"
        f"code = run(['{command}', '--node-id', 'a'])\n"
        "sys.exit(f'torch was imported' if 'torch' in sys.modules else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=loader.environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "a" in done.stdout


SHARDS = get_assigned_shards("n", 23)


def assert_sound(loader, store):
    """What is in the cache is what the store has."""
    entries = segment_of(store).shards
    for path in loader.cache.glob("shard_*.pt"):
        shard_id = int(path.name.split("-")[0].removeprefix("shard_"))
        assert sha256_hex(path.read_bytes()) == entries[shard_id].sha256


def test_a_folder_is_fetched_and_the_second_time_there_already(loader, store):
    first = loader.json("fetch", "--node-id", "n")
    assert sorted(first["fetched"]) == sorted(SHARDS) and first["there_already"] == first["failed"] == []
    assert first["tokens_fetched"] == 10 * SHARD_TOKENS
    assert first["received_bytes"] == 0 and first["bytes_per_token"] == 0
    assert loader.cached() == set(SHARDS)
    assert_sound(loader, store)
    second = loader.json("fetch", "--node-id", "n")
    assert second["fetched"] == [] and sorted(second["there_already"]) == sorted(SHARDS)
    assert second["bytes_per_token"] is None


@pytest.mark.slow
def test_over_http_the_packed_form_is_what_crosses_the_wire(http_loader, store):
    done = http_loader.json("fetch", "--node-id", "n", "--jobs", "3")
    entries = segment_of(store).shards
    packed = sum(entries[shard].packed.size_bytes for shard in SHARDS)
    [reference] = manifest_of(store).index
    index = sum((store / key).stat().st_size for key in ("manifest.json", reference.key))
    assert done["received_bytes"] == packed + index
    assert done["bytes_per_token"] == pytest.approx(done["received_bytes"] / (10 * SHARD_TOKENS))
    assert_sound(http_loader, store)
    again = http_loader("fetch", "--node-id", "n").stdout
    assert again.startswith("0 of 10 shards fetched, 10 there already; nothing over a network in ")


def test_it_goes_on_where_an_earlier_one_ended(loader, here, store):
    assert sorted(here.json("fetch", "--node-id", "n", "--shards", "4")["fetched"]) == sorted(SHARDS[:4])
    path = next(loader.cache.glob(f"shard_{SHARDS[1]}-*.pt"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    done = here.json("fetch", "--node-id", "n")
    assert sorted(done["fetched"]) == sorted([SHARDS[1], *SHARDS[4:]])
    assert sorted(done["there_already"]) == sorted([SHARDS[0], *SHARDS[2:4]])
    assert_sound(loader, store)


def test_what_one_shard_suffers_costs_the_others_nothing(here, tmp_path):
    store = copy_small_store(tmp_path / "store")
    gone, spoilt = SHARDS[2], SHARDS[5]
    for key in (packed_key(gone), shard_key(gone), packed_key(spoilt)):
        (tmp_path / "store" / key).unlink()
    (tmp_path / "store" / shard_key(spoilt)).write_bytes(b"x" * segment_of(tmp_path / "store").shards[0].size_bytes)
    options = ("--store", store.url, "--node-id", "n", "--timeout-s", "1")
    done = here.json("fetch", *options, expect=1)
    assert sorted(done["fetched"]) == sorted({*SHARDS} - {gone, spoilt})
    told = {failure["shard_id"]: failure["message"] for failure in done["failed"]}
    assert told.keys() == {gone, spoilt}
    assert "found none" in told[gone] and "sha256" in told[spoilt]
    out, errors = here("fetch", *options, expect=1)
    assert f"missing: {', '.join(map(str, sorted((gone, spoilt))))}; " in out
    assert f"loader: shard {gone}: " in errors


def test_a_cache_too_small_gets_the_shards_that_are_read_first(loader, here, store):
    size = segment_of(store).shards[0].size_bytes
    bound = ("--cache-bytes", str(3 * size + 1))
    done = here.json("fetch", "--node-id", "n", *bound, expect=1)
    assert sorted(done["fetched"]) == sorted(SHARDS[:3])
    assert done["not_begun"] == SHARDS[3:]
    assert loader.cached() == set(SHARDS[:3])
    assert "raise --cache-bytes" in here("fetch", "--node-id", "n", *bound, expect=1)[1]
    here("fetch", "--node-id", "n", *bound, "--shards", "3")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_it_at_once_and_leaves_a_sound_cache(served, store, here, tmp_path, number, code):
    stuck = SHARDS[4]

    def drip(request, reply):
        return Reply(reply.status, reply.body, reply.headers, piece_bytes=64, pause_s=5.0)

    def alter(request, reply):
        return drip(request, reply) if request.path.endswith(packed_key(stuck)) else reply

    with FaultProxy(served.port, alter=alter) as proxy:
        loader = LoaderCommand(f"http://127.0.0.1:{proxy.port}", tmp_path / "cache")
        process = loader.start("fetch", "--node-id", "n", "--jobs", "2")
        wait_until(lambda: loader.cached() == {*SHARDS} - {stuck})
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert errors.decode().splitlines()[-1] == "loader: stopped"
    assert b"Traceback" not in errors and b"Fatal" not in errors
    assert_sound(loader, store)
    after = here.json("fetch", "--node-id", "n", "--cache-dir", loader.cache)
    assert after["fetched"] == [stuck]
    assert not list(loader.cache.glob(".*.part"))


@pytest.mark.slow
def test_a_bandwidth_cap_is_kept(http_loader):
    done = http_loader.json("fetch", "--node-id", "n", "--max-bandwidth", "20kB/s")
    # Of what came, a quarter of a second's worth may have come at once, and a block a thread is not waited for.
    assert done["received_bytes"] > 20_000
    assert done["seconds"] > (done["received_bytes"] - 5_000) / 20_000 - 0.5


@pytest.mark.slow
def test_figures_are_of_this_store_and_cache(http_loader, here):
    options = ("--node-id", "n", "--seq-len", "50", "--batch-size", "4", "--batches", "25")
    cold = http_loader.json("bench", *options)
    windows_per_shard = (SHARD_TOKENS - 1) // 50
    assert (cold["batches"], cold["tokens"]) == (25, 25 * 4 * 50)
    assert cold["shards_opened"] == -(-25 * 4 // windows_per_shard)
    assert cold["received_bytes"] > 0 and cold["shards_from_cache"] == 0
    assert cold["first_batch_s"] > 0 and cold["opened_s"] > 0 and cold["stalled_s"] >= 0
    assert cold["of_slicing"] > 0 and cold["of_copying"] > 0 and cold["tokens_per_s"] > 0
    warm, _ = here("bench", *options, "--store", http_loader.store)
    assert [line.split("  ")[0] for line in warm.splitlines()][:4] == [
        "first batch",
        "stream",
        "shards",
        "reading alone",
    ]
    assert "3 of them from the cache; 0 fetched, " in warm
