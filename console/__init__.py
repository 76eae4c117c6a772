"""The Django project.

`billing`, `storage` and `jobs` import its lower packages (`accounts`, `core`, `observability`). Its upper modules
(`web`, `api`, `monitoring`, `urls`) import those three. See `docs/architecture.md`.
"""

__version__ = "0.2.0"
