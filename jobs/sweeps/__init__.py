"""Sweeps: many runs of one purchase with different parameters, within one ceiling."""
