"""The ASGI application that `console.serving.server` runs."""

from __future__ import annotations

import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")
django.setup(set_prefix=False)  # `Handler` sets the script prefix for each request

from console.serving.application import Application  # noqa: E402  # it reads the settings
from console.serving.handler import Handler  # noqa: E402  # as above

application = Application(Handler())
