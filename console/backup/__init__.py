"""Backup and restore of a whole installation: its database, its files, and the key that decrypts stored secrets.

Commands call `archive`, which uses `database` (PostgreSQL's tools) and `trees` (folders). A backup gets its name only
once it is complete. After an interrupted restore, the console does not start until the restore is repeated.
"""
