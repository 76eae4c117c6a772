"""Sweeps: many runs of one order, each with other parameters, within one ceiling."""
