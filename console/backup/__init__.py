"""Backup and restore of a whole installation: its database, its files, and what both need to be read again.

`archive` is what commands call; `database` speaks to PostgreSQL's own tools, `trees` to folders. The one rule: what is
not finished is not there. A backup gets its name when it is whole; a restore that was broken off keeps the house shut.
"""
