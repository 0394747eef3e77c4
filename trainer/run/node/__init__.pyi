"""What `trainer.run.node` offers, by module; a name's module is imported when the name is first used."""

from .starting import run_node as run_node
from .stopping import StopRequest as StopRequest
