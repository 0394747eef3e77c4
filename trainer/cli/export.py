"""`python -m trainer export`: a checkpoint as a model that other programs read."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from trainer.errors import CheckpointError, TrainerUsageError

if TYPE_CHECKING:
    from manifests import VocabularyFile
    from trainer.checkpoint import CheckpointContents
    from trainer.model.export import ExportType

__all__ = ["export_command"]

_DTYPES = ("float32", "bfloat16", "float16")


def export_command(
    out_dir: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; must be empty or not be there.")],
    to: Annotated[str, typer.Option("--to", help="hf: a Hugging Face model folder.")] = "hf",
    node_id: Annotated[str, typer.Option(help="Whose checkpoint; needless where there is only one.")] = "",
    token: Annotated[str, typer.Option(envvar="GENESIS_TOKEN", help="Wallet that names it.")] = "",
    checkpoint_dir: Annotated[str, typer.Option(help="Folder of checkpoints.")] = "~/.neuroshard/checkpoints",
    checkpoint: Annotated[Path | None, typer.Option(help="A checkpoint file, in place of those.")] = None,
    store: Annotated[str, typer.Option(help="Store of the tokenizer; else the one it was trained from.")] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Writes the model of a checkpoint, with its tokenizer, in another project's form."""
    if to != "hf":
        raise TrainerUsageError(f"--to: expected hf, found {to!r}")
    if dtype not in _DTYPES:
        raise TrainerUsageError(f"--dtype: expected one of {', '.join(_DTYPES)}, found {dtype!r}")
    from trainer.checkpoint import CheckpointContents
    from trainer.model import ModelConfig, export_hf
    from trainer.node.replica import parameters_of

    found = _read(checkpoint) if checkpoint is not None else _newest(checkpoint_dir, token, node_id)
    saved = CheckpointContents.from_mapping(found)
    shape = ModelConfig.from_dict(dict(saved.architecture))
    vocabulary = _vocabulary(saved, store, shape.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer.json"
        tokenizer.write_bytes(vocabulary.to_json())
        files = export_hf(parameters_of(saved.layers), shape, tokenizer, out_dir, dtype=cast("ExportType", dtype))
    typer.echo(f"{out_dir}: {len(files)} files, step {saved.training_rounds}, loss {saved.current_loss:.4f}")


def _read(path: Path) -> dict[str, Any]:
    from trainer.checkpoint import read_checkpoint

    if not path.is_file():
        raise CheckpointError(f"--checkpoint: expected a file, found none at {path}")
    return read_checkpoint(path)


def _newest(directory: str, token: str, node_id: str) -> dict[str, Any]:
    """The newest checkpoint of a wallet, that of the first rank if it trained under torchrun."""
    from trainer.checkpoint import load_newest, wallet_id

    if not token and not node_id:
        return _read(_only_checkpoint(directory))
    wallet = wallet_id(token, node_id)
    for instance in ("", "rank-0"):
        found = load_newest(directory, wallet, instance)
        if found is not None:
            return found
    raise CheckpointError(
        f"expected a checkpoint of this node (dynamic_node_{wallet}.pt) in {directory}, found none; check --node-id, "
        "--token and --checkpoint-dir"
    )


def _only_checkpoint(directory: str) -> Path:
    folder = Path(directory).expanduser()
    found = [path for path in folder.glob("dynamic_node_*.pt") if ".step-" not in path.name]
    if len(found) != 1:
        raise TrainerUsageError(
            f"expected one node's checkpoint in {directory}, found {len(found)}; name it by --node-id, --token or "
            "--checkpoint"
        )
    return found[0]


def _vocabulary(saved: CheckpointContents, store: str, rows: int) -> VocabularyFile:
    """The vocabulary the model was trained with: the store's newest, as far as the model has rows."""
    from manifests import FIRST_MERGE_ID, VocabularyFile
    from trainer.config import DataConfig, from_mapping
    from trainer.node.data import open_session

    options = {**saved.config.get("data", {}), **({"store": store, "mirrors": []} if store else {})}
    newest = open_session(from_mapping(DataConfig, options, "data.")).newest_catalog().vocabulary()
    if newest.next_merge_id <= rows:
        return newest
    return VocabularyFile.from_pairs(newest.pairs()[: rows - FIRST_MERGE_ID], newest.sources_contributed)
