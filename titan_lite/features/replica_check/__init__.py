"""Replicas of parameters and optimizer state are compared."""
