"""Warm starts: ranks that are forked from an interpreter with the frameworks imported."""
