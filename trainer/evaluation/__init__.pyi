"""What `trainer.evaluation` offers, by module; a name's module is imported when the name is first used."""

from .config import EvalConfig as EvalConfig
from .evaluator import Evaluation as Evaluation
from .evaluator import Evaluator as Evaluator
from .held_out import HeldOut as HeldOut
from .held_out import HeldOutLoss as HeldOutLoss
from .held_out import SourceLoss as SourceLoss
from .sampling import Sample as Sample
from .sampling import sample_text as sample_text
