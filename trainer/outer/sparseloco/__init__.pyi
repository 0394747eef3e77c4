"""What `trainer.outer.sparseloco` offers, by module; a name's module is imported when the name is first used."""

from .config import SparseLoCoConfig as SparseLoCoConfig
