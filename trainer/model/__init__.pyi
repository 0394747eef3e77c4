"""What `trainer.model` offers, by module; a name's module is imported when the name is first used."""

from .config import ModelConfig as ModelConfig
from .export import export_hf as export_hf
from .init import init_weights as init_weights
from .plan import stage_ranges as stage_ranges
from .sizing import PRESETS as PRESETS
from .sizing import available_memory_bytes as available_memory_bytes
from .sizing import choose_architecture as choose_architecture
from .sizing import flops_per_token as flops_per_token
from .sizing import memory_bytes as memory_bytes
from .sizing import num_parameters as num_parameters
from .sizing import preset as preset
from .stages import VOCAB_STEP as VOCAB_STEP
from .stages import BodyStage as BodyStage
from .stages import HeadStage as HeadStage
from .stages import Stage as Stage
from .stages import TailStage as TailStage
from .stages import Transformer as Transformer
from .stages import build_model as build_model
from .stages import build_stage as build_stage
from .stages import grow_rows as grow_rows
from .stages import grow_vocabulary as grow_vocabulary
from .stages import limit_ids as limit_ids
from .stages import rows_for as rows_for
from .stages import split as split
from .stages import within_documents as within_documents
