"""Recipes: the keys that there are, and how a file and the command line become a checked Config.

sections.py has the keys, load.py reads them, help.py prints them. The names below are for imports
from titan_lite.config. Imports no torch.
"""

from titan_lite.config.batch_sizes import gradient_accumulation_steps
from titan_lite.config.errors import ConfigError
from titan_lite.config.help import save_recipe, to_toml
from titan_lite.config.load import (
    SHIPPED,
    find_recipe,
    load_config,
    read_config,
    world_size_of,
)
from titan_lite.config.sections import (
    KEYS,
    KEYS_OF_MODULES,
    SECTIONS,
    ActivationCheckpoint,
    Checkpoint,
    Comm,
    Compile,
    Config,
    Corpus,
    Data,
    DataSource,
    Debug,
    FaultTolerance,
    Job,
    LRScheduler,
    Metrics,
    Model,
    Optimizer,
    Parallelism,
    Profiling,
    Training,
    Validation,
    changes_of,
    flatten,
    is_unset,
)
