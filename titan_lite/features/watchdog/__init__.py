"""Hangs and slow ranks: the rank that the others wait for is named."""
