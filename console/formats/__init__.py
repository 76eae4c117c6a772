"""Formats of Django's own pages, such as the admin, where ours differ from Django's."""
