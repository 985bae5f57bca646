"""The keys of a recipe. Other rooms import them from here: row.py says what a key is, learning.py and system.py have the keys."""

# ruff: noqa: F403
from titan_lite.config.keys import *
from titan_lite.config.learning import *
from titan_lite.config.row import *
from titan_lite.config.system import *
