"""Every setting of a training run, in sections, and the recipe that holds them.

A setting is one field of a section's dataclass, with its bounds, default and help. It has one name
everywhere: the field, the flag (``--chunk-words``) and the key of a recipe file (``[corpus]
chunk_words``).
"""

from revela.training.settings.objectives import OBJECTIVES as OBJECTIVES
from revela.training.settings.objectives import Crop as Crop
from revela.training.settings.objectives import Dream as Dream
from revela.training.settings.objectives import Gains as Gains
from revela.training.settings.objectives import InBatch as InBatch
from revela.training.settings.objectives import InfoNCE as InfoNCE
from revela.training.settings.objectives import Objective as Objective
from revela.training.settings.objectives import Reads as Reads
from revela.training.settings.objectives import Replug as Replug
from revela.training.settings.objectives import Revela as Revela
from revela.training.settings.objectives import Spans as Spans
from revela.training.settings.objectives import objective_class as objective_class
from revela.training.settings.recipe import SECTIONS as SECTIONS
from revela.training.settings.recipe import Recipe as Recipe
from revela.training.settings.recipe import check_unread as check_unread
from revela.training.settings.recipe import merge_settings as merge_settings
from revela.training.settings.recipe import presets as presets
from revela.training.settings.recipe import read_recipe as read_recipe
from revela.training.settings.recipe import settings_of as settings_of
from revela.training.settings.sections import LM as LM
from revela.training.settings.sections import RARE as RARE
from revela.training.settings.sections import Context as Context
from revela.training.settings.sections import Corpus as Corpus
from revela.training.settings.sections import Fit as Fit
from revela.training.settings.sections import Groups as Groups
from revela.training.settings.sections import Pooling as Pooling
from revela.training.settings.sections import Queries as Queries
from revela.training.settings.sections import Retriever as Retriever
from revela.training.settings.sections import Strategy as Strategy
from revela.training.settings.sections import TorchPrecision as TorchPrecision
from revela.training.settings.sections import Training as Training
