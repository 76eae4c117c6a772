"""Backup and restore of a whole installation: its database, its files, and the key that decrypts stored secrets.

The management commands call `archive`, which uses `database` (PostgreSQL's tools) and `trees` (folders). A backup gets
its name only when it is complete. After an interrupted restore, the console refuses to start until the restore has been
repeated.
"""
