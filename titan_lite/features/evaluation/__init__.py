"""Scores of lm-evaluation-harness, on the sharded model as it trains."""
