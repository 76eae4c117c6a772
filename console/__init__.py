"""The Django project.

Its lower packages (`accounts`, `core`, `observability`) are imported by `billing`, `storage` and `jobs`, which its
upper modules (`web`, `api`, `monitoring`, `urls`) import. See `docs/architecture.md`.
"""

__version__ = "0.2.0"
