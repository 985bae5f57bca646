"""Optional parts of a run. The rest of the package imports none of them: it asks for those that a
recipe turns on.

A feature is a folder with
    keys.py      KEYS, the keys that it adds to a recipe; TENSORS, the first words of names of
                 tensors that it adds to checkpoints; OPTIMIZERS, if it adds values of
                 optimizer.name (config/optimizers.py); always imported, without torch
    rules.py     what cannot be together with these keys (titan_lite/rules/); always imported
    feature.py   FEATURE, its Feature (titan_lite/feature.py): where it takes part in a run

and whatever these import. To remove a feature, delete its folder, its tests, its line here and that
in pyproject.toml.
"""

FEATURES = ("matrix_optimizers", "moe", "powersgd", "copies", "own_family")

# whoever imports a feature's keys first needs the tables that they are added to
import titan_lite.config  # noqa: E402, F401
