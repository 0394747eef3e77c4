"""A whole model from a Hugging Face folder: looked over before memory is taken, named by its values, read into a model.

    pretrained = Pretrained.open(folder)        # config.json and the files' headers: names, types, shapes
    pretrained.digest()                         # one pass over the weights
    pretrained.fill_(model)                     # another, a tensor at a time

The digest is of values, not of files: the SHA-256 over the fp32 weights in the model's order. So the same weights in
one file or many, in bf16 or in fp32, are the same model. The trade-off: the weights are read twice, and no more than
one tensor is held beside the model.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor
from typing_extensions import Buffer

from trainer.checkpoint.stages.huggingface import CONFIG_NAME, HfFolder
from trainer.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError
from trainer.model.config import ModelConfig
from trainer.model.huggingface import hf_names
from trainer.model.init import EMBEDDING, OUTPUT
from trainer.model.stages import Transformer, model_shapes

logger = logging.getLogger(__name__)

_TYPES: Final = ("F32", "BF16", "F16")
_OF_NO_ACCOUNT: Final = (".rotary_emb.inv_freq",)  # Tables that releases of transformers before 4.30 saved.


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model in a folder, whose files fit what its config.json states."""

    path: Path
    config: ModelConfig
    """Its shape; ``vocab_size`` counts its own rows, padding included."""
    _folder: HfFolder
    _names: dict[str, str]

    @classmethod
    def open(cls, path: str | Path) -> Pretrained:
        """Reads the description and the headers, and holds them against each other.

        Raises:
            CheckpointError: there is no such folder, or it has other files.
            CheckpointMismatchError: it is of no family read here, or tensors are missing, unknown, or of another shape
                or type than it states.
            CorruptCheckpointError: a file is unreadable.
        """
        folder_path = Path(path).expanduser()
        if not (folder_path / CONFIG_NAME).is_file():
            raise CheckpointError(
                f"--init-from {folder_path}: expected a Hugging Face folder ({CONFIG_NAME} and safetensors), found "
                f"{'no ' + CONFIG_NAME + ' in it' if folder_path.is_dir() else 'no such folder'}"
            )
        folder = HfFolder(folder_path)
        config = folder.config
        opened = cls(folder_path, config, folder, hf_names(config))
        opened._check()
        return opened

    def digest(self) -> str:
        """Returns the SHA-256, lower-case hex, of names, shapes and fp32 values. Raises what `fill_` does."""
        digest = hashlib.sha256()
        for name, tensor in self._tensors():
            digest.update(f"{name} {list(tensor.shape)}\n".encode())
            digest.update(cast("Buffer", tensor.contiguous().numpy()))
        return digest.hexdigest()

    @torch.no_grad()
    def fill_(self, model: Transformer) -> None:
        """Sets a model's parameters; rows of the vocabulary that only one of the two has stay as they are.

        Raises:
            CheckpointMismatchError: the model has another shape.
            CorruptCheckpointError: a tensor is unreadable, not finite, or no longer what its header said.
        """
        parameters = dict(model.named_parameters())
        for name, tensor in self._tensors():
            target = parameters.pop(name, None)
            if target is None or (tensor.shape != target.shape and name not in (EMBEDDING, OUTPUT)):
                raise CheckpointMismatchError(
                    f"{self.path}: expected no {name} of shape {tuple(tensor.shape)}, found it"
                )
            rows = min(len(target), len(tensor))
            target[:rows].copy_(tensor[:rows])
        if parameters:
            raise CheckpointMismatchError(f"{self.path}: expected a tensor for {next(iter(parameters))}, found none")

    def _check(self) -> None:
        """Compares all files' headers with the config; nothing of a tensor is read."""
        shapes = model_shapes(self.config)
        stated = self._folder.stated(self._names.values())
        for name, place in self._names.items():
            kind, shape = stated[place]
            if kind not in _TYPES:
                raise CheckpointMismatchError(
                    f"{self.path}: expected {place} of type {', '.join(_TYPES)}, found {kind[:20]}; take weights that "
                    "are not quantised"
                )
            if shape != shapes[name]:
                raise CheckpointMismatchError(
                    f"{self.path}: expected {place} of shape {shapes[name]}, as {CONFIG_NAME} states, found {shape}"
                )
        unknown = self._folder.all_names() - set(self._names.values())
        unknown -= {"lm_head.weight"} if self.config.tie_embeddings else set()
        unknown = {name for name in unknown if not name.endswith(_OF_NO_ACCOUNT)}
        if unknown:
            raise CheckpointMismatchError(
                f"{self.path}: expected only the tensors of a model as {CONFIG_NAME} states it, found "
                f"{min(unknown)[:80]!r}, which would be lost"
            )

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields our name and fp32 values of each tensor, in the model's order."""
        shapes = model_shapes(self.config)
        for name, place in self._names.items():
            tensor = self._folder.read(place).float()
            if tuple(tensor.shape) != shapes[name] or not torch.isfinite(tensor).all():
                raise CorruptCheckpointError(
                    f"{self.path}: expected finite weights of shape {shapes[name]} in {place}, found others"
                )
            yield name, tensor
