"""What `trainer.subspace` offers, by module; a name's module is imported when the name is first used."""

from .basis import Basis as Basis
from .basis import basis_of as basis_of
from .codec import ACTIVATION_CODECS as ACTIVATION_CODECS
from .codec import ActivationCodec as ActivationCodec
from .codec import Encoded as Encoded
from .codec import activation_codec as activation_codec
from .config import SubspaceConfig as SubspaceConfig
from .constraint import SubspaceConstraint as SubspaceConstraint
from .embedding import SubspaceEmbedding as SubspaceEmbedding
from .embedding import fixed_table as fixed_table
from .embedding import fixed_table_of as fixed_table_of
from .ids import ids_spec as ids_spec
from .meter import LinkFigures as LinkFigures
from .meter import LinkMeter as LinkMeter
from .plain import plain_config as plain_config
from .plain import plain_state as plain_state
