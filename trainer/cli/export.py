"""`python -m trainer export`: a checkpoint as a model that other programs read."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from trainer.errors import CheckpointError, TrainerUsageError

__all__ = ["export_command"]


def export_command(
    out_dir: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; must be empty or not be there.")],
    to: Annotated[str, typer.Option("--to", help="hf: a Hugging Face model folder.")] = "hf",
    node_id: Annotated[str, typer.Option(help="Whose checkpoint.")] = "",
    token: Annotated[str, typer.Option(envvar="GENESIS_TOKEN", help="Wallet that names it.")] = "",
    checkpoint_dir: Annotated[str, typer.Option(help="Folder of checkpoints.")] = "~/.neuroshard/checkpoints",
    checkpoint: Annotated[Path | None, typer.Option(help="A checkpoint file, in place of those.")] = None,
    store: Annotated[str, typer.Option(help="Store of the tokenizer; else the one it was trained from.")] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Writes the model of a checkpoint, with its tokenizer, in another project's form."""
    if to != "hf":
        raise TrainerUsageError(f"--to: expected hf, found {to!r}")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise TrainerUsageError(f"--dtype: expected float32, bfloat16 or float16, found {dtype!r}")
    from trainer.checkpoint import CheckpointContents, load_newest, read_checkpoint, wallet_id
    from trainer.config import DataConfig
    from trainer.model import ModelConfig, export_hf
    from trainer.node.replica import parameters_of
    from trainer.node.vocabulary import VocabularyWatch

    if checkpoint is not None:
        found = read_checkpoint(checkpoint)
    else:
        found = load_newest(checkpoint_dir, wallet_id(token, node_id)) or {}
        if not found:
            raise CheckpointError(f"expected a checkpoint of this node in {checkpoint_dir}, found none")
    saved = CheckpointContents.from_mapping(found)
    data = saved.config.get("data")
    store = store or (str(data["store"]) if isinstance(data, dict) else "")
    vocabulary = VocabularyWatch(DataConfig(store=store)).vocabulary
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer.json"
        tokenizer.write_bytes(vocabulary.to_json())
        files = export_hf(
            parameters_of(saved.layers),
            ModelConfig.from_dict(dict(saved.architecture)),
            tokenizer,
            out_dir,
            dtype=_dtype(dtype),
        )
    typer.echo(f"{out_dir}: {len(files)} files, step {saved.training_rounds}, loss {saved.current_loss:.4f}")


def _dtype(name: str) -> Literal["float32", "bfloat16", "float16"]:
    if name == "bfloat16":
        return "bfloat16"
    return "float16" if name == "float16" else "float32"
