"""What `trainer.compression.activations` offers, by module; a name's module is imported when the name is first used."""

from .codec import ACTIVATION_CODECS as ACTIVATION_CODECS
from .codec import ActivationCodec as ActivationCodec
from .codec import Encoded as Encoded
from .codec import activation_codec as activation_codec
from .meter import LinkFigures as LinkFigures
from .meter import LinkMeter as LinkMeter
from .packing import ids_spec as ids_spec
