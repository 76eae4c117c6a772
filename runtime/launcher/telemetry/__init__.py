"""Measurements of a node's ranks: resource usage, step times, stacks, and whether the run hangs."""
