"""`manage.py up`: the embedded PostgreSQL and Redis, migrations at start, and the supervised processes."""
