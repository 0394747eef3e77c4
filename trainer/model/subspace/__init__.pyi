"""What `trainer.model.subspace` offers, by module; a name's module is imported when the name is first used."""

from .basis import Basis as Basis
from .basis import basis_of as basis_of
from .config import SubspaceConfig as SubspaceConfig
from .constraint import SubspaceConstraint as SubspaceConstraint
from .constraint import SubspaceEmbedding as SubspaceEmbedding
from .constraint import fixed_table as fixed_table
from .constraint import fixed_table_of as fixed_table_of
from .constraint import plain_config as plain_config
from .constraint import plain_state as plain_state
