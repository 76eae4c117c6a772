"""Shared parts of the console: errors, pagination, parsers, enqueueing, server-sent events."""
