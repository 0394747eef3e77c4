"""What a node's weights begin as: drawn by the seed, a Hugging Face folder's, a checkpoint's, or the state of its run.

Nodes of one run must have begun with the same weights, so their digest (`Pretrained.digest`) is part of the terms they
compare, is written into the node's resolved configuration, and comes back from its checkpoint. A node that knows the
digest and has no folder takes the state of others before it trains; one that knows nothing asks its initial peers.

The folder's ids must mean what the store's do. Sizes are compared, and where the folder has a tokenizer.json, each id.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from genesis.errors import GenesisError
from genesis.tokenizer.export import export_files
from manifests import Vocabulary, VocabularyFile
from trainer.errors import (
    CheckpointMismatchError,
    IncompatiblePeerError,
    RpcError,
    TrainerError,
    TrainerUsageError,
)
from trainer.model import ModelConfig, Transformer
from trainer.model.choice import AUTO, ModelChoice
from trainer.run.config import RunConfig

if TYPE_CHECKING:
    from trainer.checkpoint.node import CheckpointContents
    from trainer.checkpoint.pretrained import Pretrained
    from trainer.collective import Terms

logger = logging.getLogger(__name__)

_PADDING_SHARE: Final = 20  # Embeddings are padded to a multiple of 64 to 1,024 rows, at most to a 20th more.
_PADDING_ROWS: Final = 1024
_TOKENIZER_NAME: Final = "tokenizer.json"
_LARGEST_TOKENIZER_BYTES: Final = 1 << 28
_QUESTION_S: Final = 20.0  # A peer that is busy answers late; one that is not there is refused at once.


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """With what a node begins."""

    choice: ModelChoice
    """The run's choice, and what was found out about it."""
    pretrained: Pretrained | None = None
    """The folder to begin with; None: something else decides."""
    awaits_state: bool = False
    """Whether the node has nothing to train before it has the state of others."""

    def shape(self, vocab_rows: int) -> ModelConfig | None:
        """Returns the shape of the folder's model with so many rows; None without a folder."""
        return replace(self.pretrained.config, vocab_size=vocab_rows) if self.pretrained is not None else None

    def fill_(self, model: Transformer) -> None:
        """Sets a model's first weights, where they are a folder's."""
        if self.pretrained is not None:
            self.pretrained.fill_(model)
            logger.info("first weights: %s, digest %s", self.pretrained.path, self.choice.init_digest[:12])


def origin_of(config: RunConfig, saved: CheckpointContents | None, vocabulary: Vocabulary) -> Origin:
    """Finds what a node begins with.

    Raises:
        CheckpointMismatchError: the checkpoint is of a run that began with something else, or the folder's model has
            another vocabulary or shape than asked for.
        CheckpointError: the folder cannot be used.
        TrainerUsageError: the options do not go together.
    """
    choice, can_ask = (
        config.model,
        bool(config.discovery.initial_peers) and config.has_common_state,
    )
    if saved is not None:
        return Origin(choice=_resumed(choice, saved))
    is_elsewhere = choice.init_digest and can_ask and not Path(choice.init_from).expanduser().exists()
    if choice.init_from and not is_elsewhere:  # As in the configuration that a node of another machine has written.
        return _from_folder(choice, vocabulary)
    if not choice.init_digest and _leaves_all_open(config):
        choice = _asked(config)
    if not choice.init_digest:
        return Origin(choice=choice)
    if not can_ask:
        raise TrainerUsageError(
            "model.init_digest: expected the folder (--init-from), or nodes of the run to take the state from "
            "(--initial-peers), found neither"
        )
    return Origin(choice=choice, awaits_state=True)


def _resumed(choice: ModelChoice, saved: CheckpointContents) -> ModelChoice:
    """Returns the choice with the digest of the checkpoint's run; a folder that it began with is not read again."""
    of_saved = saved.config.get("model")
    of_saved = of_saved if isinstance(of_saved, Mapping) else {}
    digest = str(of_saved.get("init_digest") or "")
    wanted = choice.init_digest
    if choice.init_from and not wanted:
        is_known = bool(digest) and choice.init_from == of_saved.get("init_from")
        wanted = digest if is_known else _opened(choice).digest()
    if wanted not in ("", digest):
        raise CheckpointMismatchError(
            f"expected a checkpoint of a run that began with the weights {wanted[:12]}, found one that began with "
            f"{digest[:12] or 'weights by its seed'}; name another folder (--checkpoint-dir), or go on with it without "
            "--init-from"
        )
    return replace(choice, init_digest=digest)


def _opened(choice: ModelChoice) -> Pretrained:
    from trainer.checkpoint.pretrained import Pretrained  # safetensors, for runs that begin with a model alone.

    return Pretrained.open(choice.init_from)


def _from_folder(choice: ModelChoice, vocabulary: Vocabulary) -> Origin:
    pretrained = _opened(choice)
    wrong = choice.contradicts(pretrained.config)
    if wrong:
        raise CheckpointMismatchError(
            f"--init-from {pretrained.path}: expected its shape or none, found {wrong}; leave out --preset and the "
            "fields of model"
        )
    check_vocabulary(pretrained, vocabulary)
    digest = pretrained.digest()
    if choice.init_digest not in ("", digest):
        raise CheckpointMismatchError(
            f"--init-from {pretrained.path}: expected the weights {choice.init_digest[:12]} (model.init_digest), found "
            f"{digest[:12]}; take the folder that the run began with"
        )
    return Origin(choice=replace(choice, init_digest=digest), pretrained=pretrained)


# -- the vocabulary ----------------------------------------------------------------------------------------------------


def check_vocabulary(pretrained: Pretrained, vocabulary: Vocabulary) -> None:
    """Raises `CheckpointMismatchError` where the folder's ids are not the store's, as far as the folder says."""
    num_ids, rows, path = vocabulary.next_merge_id, pretrained.config.vocab_size, pretrained.path / _TOKENIZER_NAME
    theirs = _spellings(_read(path), str(path)) if path.is_file() else None
    fewest = num_ids
    if isinstance(vocabulary, VocabularyFile) and theirs:  # It may have grown: the model has a row for each id before.
        fewest = min(num_ids, 1 + max(theirs))
    if not fewest <= rows <= num_ids + max(_PADDING_ROWS, num_ids // _PADDING_SHARE):
        raise CheckpointMismatchError(
            f"--init-from {pretrained.path}: expected a model with a row for each of the store's {num_ids} ids (and a "
            f"few that pad), found {rows} rows; populate a store with the model's own vocabulary (genesis populate "
            "--tokenizer FILE), or take a model of this one"
        )
    if theirs is None:
        logger.info("%s has no tokenizer.json: only the number of ids was compared, %d", pretrained.path, num_ids)
        return
    ours = _spellings(_of_store(vocabulary), "the store")
    compared = (ours.keys() | theirs.keys()) - set(range(fewest, num_ids))
    wrong = [number for number in sorted(compared) if ours.get(number) != theirs.get(number)]
    if rows < num_ids and not wrong:
        logger.info("the store's vocabulary has grown to %d ids; rows behind the model's %d are drawn", num_ids, rows)
    if wrong:
        found, expected = (f"{each.get(wrong[0])!r:.40}" for each in (theirs, ours))
        raise CheckpointMismatchError(
            f"{path}: expected the store's vocabulary, found another: id {wrong[0]} is {found}, in the store {expected}"
            "; populate a store with this tokenizer (genesis populate --tokenizer)"
        )


def _of_store(vocabulary: Vocabulary) -> bytes:
    if not isinstance(vocabulary, VocabularyFile):
        return vocabulary.tokenizer_json.encode()
    try:
        files = export_files(vocabulary, "hf")
    except GenesisError as error:
        raise TrainerError(f"the store's tokenizer cannot be compared: {error}") from error
    return next(body for name, body in files.items() if Path(name).name == "tokenizer.json")


def _read(path: Path) -> bytes:
    if path.stat().st_size > _LARGEST_TOKENIZER_BYTES:
        raise CheckpointMismatchError(f"{path}: expected at most {_LARGEST_TOKENIZER_BYTES} bytes, found more")
    return path.read_bytes()


def _spellings(body: bytes, where: str) -> dict[int, str]:
    """Returns what each id spells in Hugging Face's form, added tokens included."""
    try:
        found = json.loads(body)
        vocabulary = found["model"]["vocab"]
        pairs = (
            vocabulary.items()
            if isinstance(vocabulary, dict)
            else ((each[0], at) for at, each in enumerate(vocabulary))
        )
        spelt = {int(number): str(token) for token, number in pairs}
        return spelt | {int(each["id"]): str(each["content"]) for each in found.get("added_tokens") or ()}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise CheckpointMismatchError(f"{where}: expected a tokenizer in Hugging Face's form, found none") from error


# -- the others --------------------------------------------------------------------------------------------------------


def _leaves_all_open(config: RunConfig) -> bool:
    """Returns whether nothing says which model a joiner trains."""
    model = config.model
    return bool(
        config.engine == "p2p"
        and config.has_common_state
        and config.discovery.initial_peers
        and model == ModelChoice(memory_bytes=model.memory_bytes)
        and model.preset == AUTO
    )


def _asked(config: RunConfig) -> ModelChoice:
    """Returns the choice of the run that an initial peer is of, where that began with a model; else the node's own.

    Seeds (``/ip4/…``) hold no model and are not asked.
    """
    from trainer.collective.messages import INIT_DIGEST
    from trainer.network.rpc.config import has_port

    addresses = [each for each in config.discovery.initial_peers if not each.startswith("/") and has_port(each)]
    terms = _first_terms(config, addresses)
    digest = terms.synchronisation.get(INIT_DIGEST) if terms is not None else None
    if terms is None or not isinstance(digest, str):
        return config.model
    try:
        shape = ModelConfig.from_dict({**terms.architecture, "vocab_size": 1024})
        choice = config.model.resolved(shape, digest)
    except TrainerUsageError as error:
        raise IncompatiblePeerError(f"the run's architecture cannot be used: {error}") from error
    logger.info("this run began with the weights %s: its shape and state are taken from the others", digest[:12])
    return choice


def _first_terms(config: RunConfig, addresses: list[str]) -> Terms | None:
    """Returns what the first of these peers that answers trains; None where none does in time."""
    from trainer.collective import Terms
    from trainer.network.rpc import Endpoint, Peer
    from trainer.run.node.admission import admission_client, join_reachably, reach_of
    from trainer.run.node.identity import TERMS, identity_of
    from trainer.run.node.loop_thread import LoopThread

    loop, identity = LoopThread("genesis-question"), identity_of(config)
    client = admission_client(config, identity, "node")
    admission, reach = None if client is None else client.admission, reach_of(config, client)
    endpoint = Endpoint(identity, config.run_id, config.rpc, admission, reach)
    nothing = Terms(architecture={}, tokenizer_lineage="", synchronisation={})

    async def ask() -> Any:
        if client is not None:  # The others answer members only.
            client.register(endpoint)
            await endpoint.start()
            await join_reachably(client, endpoint, reach, config)
        for address in addresses:
            try:
                return (await endpoint.call(Peer(None, address), TERMS, nothing, Terms, timeout_s=_QUESTION_S)).body
            except RpcError as error:
                logger.debug("%s: %s", address, error)
        return None

    async def ask_and_stop() -> Any:
        try:
            return await ask()
        finally:
            await endpoint.stop()

    loop.start()
    try:
        joining_s = 0.0 if client is None else config.admission.join_timeout_s + config.relay.wait_s
        found: Terms | None = loop.run(ask_and_stop(), joining_s + (_QUESTION_S + 1) * (len(addresses) + 1))
        return found
    finally:
        loop.stop()
