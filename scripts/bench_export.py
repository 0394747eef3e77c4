"""Exports against plain copying and against the peers' own writers, in one run.

    python scripts/bench_export.py                            # every form; three passes
    python scripts/bench_export.py --to npy mds --passes 5
    python scripts/bench_export.py --peers FOLDER             # where megatron-core, mosaicml-streaming, datatrove are

"MB/s" is megabytes of exported ids (2 bytes each) by the processor seconds that a process took after its imports, all
of its threads together: what one core does. "Wall" is by its seconds, fsync of the output included. Ours is the whole
export: shards read, hashed, expanded, cut into documents, written, synced, indexed. "Copy" reads the transfer forms
and writes as many bytes as the export has, nothing else: what no export can do without. A peer's writer is handed its
documents as arrays in memory, one after the other; neither reading nor verifying is counted. Figures go to
docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

FORMS = ("megatron", "mds", "datatrove", "npy")
PEERS = {"megatron": "IndexedDatasetBuilder", "mds": "MDSWriter", "datatrove": "TokenizedFile"}
_PEER_SHARDS = 4
"""Shards that the peers write: some need minutes for more."""


def make_store(arguments: argparse.Namespace, folder: Path) -> str:
    """A store of the corpus, read several times under different names."""
    inputs = folder / "input"
    inputs.mkdir()
    originals = sorted(arguments.corpus.glob("*.parquet"))
    if not originals:
        sys.exit(f"no .parquet in {arguments.corpus}; give --corpus or --store")
    for copy in range(arguments.copies):
        for original in originals:
            (inputs / f"{copy:02d}_{original.name}").symlink_to(original)
    command = [sys.executable, "-m", "genesis", "populate", "--source", "fineweb-edu", "--store", str(folder / "store")]
    subprocess.run([*command, "--input", str(inputs)], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return str(folder / "store")


def timed(work: Callable[[], int]) -> dict[str, float]:
    """Bytes of ids, processor seconds of all threads, and seconds, of ``work``, which returns the first."""
    before, started_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    num_bytes = work()
    wall_s = time.perf_counter() - started_s
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"bytes": num_bytes, "cpu_s": cpu_s, "wall_s": wall_s}


def run_ours(form: str, store: str, out: Path) -> dict[str, float]:
    """One export."""
    from genesis.export import ExportFormat, ExportOptions, export_shards
    from genesis.store import open_readable

    options = ExportOptions(target=ExportFormat(form))
    return timed(lambda: export_shards(open_readable(store), out, options).id_bytes)


def run_copy(form: str, store: str, out: Path) -> dict[str, float]:
    """Reads every transfer form and writes as many bytes of ids, synced."""
    from genesis.store import open_readable
    from manifests import Manifest, packed_key

    readable = open_readable(store)
    manifest = Manifest.from_json(readable.get("manifest.json").body)
    out.mkdir()
    body = os.urandom(2 * manifest.shard_tokens)

    def copy() -> int:
        with (out / "copy").open("wb", buffering=0) as file:
            for shard_id in range(manifest.total_shards):
                readable.get(packed_key(shard_id))
                file.write(body)
            os.fsync(file.fileno())
        return len(body) * manifest.total_shards

    return timed(copy)


def run_peer(form: str, store: str, out: Path) -> dict[str, float]:
    """The peer's own writer over documents in memory."""
    import warnings

    import numpy as np

    from genesis.store import open_readable
    from manifests import decode_shard, shard_key

    warnings.simplefilter("ignore")
    readable = open_readable(store)
    row = np.concatenate([decode_shard(readable.get(shard_key(each)).body) for each in range(_PEER_SHARDS)])
    row = row.astype(np.uint16)
    ends = np.flatnonzero(row == 2) + 1
    documents = np.split(row[: ends[-1]], ends[:-1])
    out.mkdir()
    if form == "megatron":
        import torch
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        tensors = [torch.from_numpy(document.astype(np.int32)) for document in documents]

        def write() -> None:
            builder = IndexedDatasetBuilder(str(out / "tokens.bin"), dtype=np.uint16)
            for tensor in tensors:
                builder.add_document(tensor, [len(tensor)])
            builder.finalize(str(out / "tokens.idx"))
    elif form == "mds":
        from tests.support.export_peers import without_torchvision

        without_torchvision()
        from streaming import MDSWriter

        def write() -> None:
            with MDSWriter(columns={"tokens": "ndarray:uint16"}, out=str(out)) as writer:
                for document in documents:
                    writer.write({"tokens": document})
    else:
        from datatrove.pipeline.tokens.tokenizer import TokenizedFile

        lists = [document.tolist() for document in documents]

        def write() -> None:
            file = TokenizedFile(str(out), "tokens.ds", save_final_metadata=True)
            for document in lists:
                file.write(document, None)
            file.close()

    def whole() -> int:
        write()
        return 2 * int(ends[-1])

    return timed(whole)


RUNS = {"ours": run_ours, "copy": run_copy, "peer": run_peer}


def child(side: str, form: str, store: str, folder: Path, peers: Path | None) -> dict[str, float]:
    """One run in a process of its own."""
    path = os.pathsep.join([str(ROOT), *([str(peers)] if side == "peer" and peers else [])])
    command = [sys.executable, __file__, "--child", side, form, store, str(folder / "out")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}
    )
    shutil.rmtree(folder / "out", ignore_errors=True)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def install_peers(folder: Path, forms: list[str]) -> Path:
    """The peers as released, without their requirements."""
    from tests.support.export_peers import REQUIREMENTS

    wanted = [name for form in forms for name in REQUIREMENTS.get(form, ())]
    if wanted:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "peers")]
        subprocess.run([*command, *wanted], check=True)
    return folder / "peers"


def bench(arguments: argparse.Namespace, folder: Path) -> None:
    """Prints a line for each form: the medians of the passes, the sides in turn."""
    store = arguments.store or make_store(arguments, folder)
    peers = arguments.peers or install_peers(folder, arguments.to)
    print(
        f"exports of {store}: MB of ids (uint16) a processor second, and a second; median of {arguments.passes} passes"
    )
    columns = ("to", "MB/s cpu", "copy", "ours/copy", "peer", "ours/peer", "MB/s wall", "copy", "ours/copy")
    print(" ".join(f"{column:>10}" for column in columns))
    for form in arguments.to:
        sides = [side for side in RUNS if side != "peer" or form in PEERS]
        laps: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for _ in range(arguments.passes):
            for side in sides:
                laps[side].append(child(side, form, store, folder, peers))
        rate = {
            (side, clock): median(lap["bytes"] / lap[clock] / 1e6 for lap in laps[side])
            for side in sides
            for clock in ("cpu_s", "wall_s")
        }
        ours, copy, peer = rate["ours", "cpu_s"], rate["copy", "cpu_s"], rate.get(("peer", "cpu_s"))
        against = f"{peer:>10.1f} {ours / peer:>10.1f}" if peer else f"{'-':>10} {'-':>10}"
        wall, copy_wall = rate["ours", "wall_s"], rate["copy", "wall_s"]
        print(
            f"{form:>10} {ours:>10.0f} {copy:>10.0f} {ours / copy:>10.2f} {against} "
            f"{wall:>10.0f} {copy_wall:>10.0f} {wall / copy_wall:>10.2f}",
            flush=True,
        )


def main() -> None:
    """Runs the bench, or one side of it in a child."""
    if sys.argv[1:2] == ["--child"]:
        side, form, store, out = sys.argv[2:]
        print(json.dumps(RUNS[side](form, store, Path(out))))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--corpus", type=Path, default=ROOT.parent / "shared" / "corpus" / "fineweb-edu")
    parser.add_argument("--copies", type=int, default=3, help="times the corpus is read under different names")
    parser.add_argument("--store", default=None, help="export this store's shards instead; of 65,536 ids or fewer")
    parser.add_argument("--folder", default=None, help="where to write; default the system's temporary folder")
    parser.add_argument("--peers", type=Path, default=None, help="a folder that has the peers; else they are installed")
    parser.add_argument("--passes", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="bench-export-") as name:
        bench(arguments, Path(name))


if __name__ == "__main__":
    main()
