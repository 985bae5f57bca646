"""No rules: copies are compared with all other keys."""
