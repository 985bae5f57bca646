"""A feature that is added to a copy of the package by tests/integration/test_features.py: gradients
times a factor.
"""
