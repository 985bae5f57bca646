"""The keys of a recipe, for other rooms to import. row.py defines what a key is; learning.py and system.py list the keys."""

# ruff: noqa: F403
from titan_lite.config.keys import *
from titan_lite.config.learning import *
from titan_lite.config.row import *
from titan_lite.config.system import *
