"""Logs, traces, counters and heartbeats, for every package above it."""
