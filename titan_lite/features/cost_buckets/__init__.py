"""Buckets of collectives by the cost model: greedy ones, and Inductor's."""
