"""Hypothesis as these tests want it: the same examples each time, and no clock of its own on a busy machine."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "billing", deadline=None, derandomize=True, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("billing")
