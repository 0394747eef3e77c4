"""The public names of `trainer.run.signed`; each module is imported when a name of it is first used."""

from .chain import ChangeChain as ChangeChain
from .chain import RunChange as RunChange
from .files import RunFile as RunFile
from .run import ChangesInForce as ChangesInForce
from .run import SignedRun as SignedRun
