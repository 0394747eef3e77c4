"""What `trainer.network.rpc` offers, by module; a name's module is imported when the name is first used."""

from .admission import Admission as Admission
from .config import RpcConfig as RpcConfig
from .credential import Credential as Credential
from .credential import RevokedPeers as RevokedPeers
from .endpoint import Endpoint as Endpoint
from .envelope import parse_strict_json as parse_strict_json
from .identity import Identity as Identity
from .identity import load_or_create_identity as load_or_create_identity
from .identity import verify_signature as verify_signature
from .messages import Counters as Counters
from .messages import Frame as Frame
from .messages import Message as Message
from .messages import Peer as Peer
from .messages import PeerId as PeerId
from .messages import Reason as Reason
from .messages import Reply as Reply
from .messages import Request as Request
from .scoped import CallEndpoint as CallEndpoint
from .scoped import ScopedEndpoint as ScopedEndpoint
from .scoped import scoped_endpoint as scoped_endpoint
from .stream import ServerStream as ServerStream
from .stream import Stream as Stream
