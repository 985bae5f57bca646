"""The keys of a recipe. Other rooms import them from here; keys.py has them."""

from titan_lite.config.keys import *  # noqa: F403
