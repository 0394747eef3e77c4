"""What `trainer.collective.levels` offers, by module; a name's module is imported when the name is first used."""

from .group_plan import GroupPlan as GroupPlan
from .group_plan import guaranteed_liars as guaranteed_liars
from .group_plan import num_groups as num_groups
from .grouped_round import GroupedRound as GroupedRound
from .level_service import LevelService as LevelService
from .messages import GroupedAgreement as GroupedAgreement
