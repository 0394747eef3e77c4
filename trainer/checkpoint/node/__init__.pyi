"""What `trainer.checkpoint.node` offers, by module; a name's module is imported when the name is first used."""

from .checkpointer import Checkpointer as Checkpointer
from .contents import CheckpointContents as CheckpointContents
from .contents import load_newest as load_newest
from .contents import read_checkpoint as read_checkpoint
from .naming import checkpoint_path as checkpoint_path
from .naming import former_wallet_id as former_wallet_id
from .naming import take_over_former_names as take_over_former_names
from .naming import wallet_id as wallet_id
