"""The Django project: the floor (`accounts`) and the roof (`web`, `api`, `urls`), which never touch."""

__version__ = "0.2.0"
