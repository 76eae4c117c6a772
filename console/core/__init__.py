"""Shared by all packages of the console: errors, pagination, parsers, encryption, tasks, server-sent events."""
