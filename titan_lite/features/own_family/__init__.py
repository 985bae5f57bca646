"""A model family in a Python file of the user's own (model.name = "FILE.py")."""
