"""What `loader` offers, by module; a name's module is imported when the name is first used."""

from .data_loader import GenesisDataLoader as GenesisDataLoader
from .dataset import GenesisDataset as GenesisDataset
from .errors import CacheError as CacheError
from .errors import CorruptObjectError as CorruptObjectError
from .errors import DataUnavailableError as DataUnavailableError
from .errors import HostileStoreError as HostileStoreError
from .errors import LoaderError as LoaderError
from .errors import LoaderUsageError as LoaderUsageError
from .errors import ManifestRollbackError as ManifestRollbackError
from .errors import ManifestSignatureError as ManifestSignatureError
from .errors import StateMismatchError as StateMismatchError
from .errors import TokenizerSyncError as TokenizerSyncError
from .errors import UntrustedManifestError as UntrustedManifestError
from .shard_tokens import ShardTokens as ShardTokens
from .stream.assignment import get_assigned_shards as get_assigned_shards
from .stream.assignment import rendezvous_shards as rendezvous_shards
from .stream.assignment import verify_assignment as verify_assignment
from .stream.plateau import PlateauRule as PlateauRule
