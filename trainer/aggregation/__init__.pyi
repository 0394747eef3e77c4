"""What `trainer.aggregation` offers, by module; a name's module is imported when the name is first used."""

from .config import RuleConfig as RuleConfig
from .deciding import RuleDecision as RuleDecision
from .deciding import decide as decide
from .deciding import effective_rule as effective_rule
from .deciding import needs_decision as needs_decision
from .deciding import needs_moments as needs_moments
from .reducing import reduce_part as reduce_part
from .second_moments import Moments as Moments
from .second_moments import finite_rows as finite_rows
from .second_moments import moments as moments
from .validation import DEFAULT_MAX_RATIO as DEFAULT_MAX_RATIO
from .validation import Finding as Finding
from .validation import Weighing as Weighing
from .validation import cap_weights as cap_weights
from .validation import common_progress as common_progress
from .validation import contribution_weight as contribution_weight
from .validation import validate as validate
