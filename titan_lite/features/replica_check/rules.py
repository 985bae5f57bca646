"""No rules: replicas are compared with all other keys."""
