"""Every setting of a training run, in sections, and the recipe that holds them.

A setting has one name everywhere: the field, the flag (``--chunk-words``) and the key of a recipe
file (``[corpus] chunk_words``). Only the first setting of groups, queries, context and lm has the
section's name as flag: ``--groups``, ``--queries``, ``--context``, ``--lm``.
"""

from revela.training.settings.objectives import (
    OBJECTIVES,
    Crop,
    Dream,
    Gains,
    InBatch,
    InfoNCE,
    Objective,
    Replug,
    Revela,
    Spans,
    objective_class,
)
from revela.training.settings.recipe import (
    SECTIONS,
    Recipe,
    build_recipe,
    check_unread,
    fields_of,
    flag_of,
    merge_settings,
    presets,
    read_recipe,
)
from revela.training.settings.sections import (
    CHECKED,
    LM,
    Context,
    Corpus,
    Fit,
    Groups,
    Pooling,
    Queries,
    Retriever,
    TorchPrecision,
    Training,
    descriptions,
    is_rare,
)

__all__ = [
    "CHECKED",
    "LM",
    "OBJECTIVES",
    "SECTIONS",
    "Context",
    "Corpus",
    "Crop",
    "Dream",
    "Fit",
    "Gains",
    "Groups",
    "InBatch",
    "InfoNCE",
    "Objective",
    "Pooling",
    "Queries",
    "Recipe",
    "Replug",
    "Retriever",
    "Revela",
    "Spans",
    "TorchPrecision",
    "Training",
    "build_recipe",
    "check_unread",
    "descriptions",
    "fields_of",
    "flag_of",
    "is_rare",
    "merge_settings",
    "objective_class",
    "presets",
    "read_recipe",
]
