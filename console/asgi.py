"""The ASGI application of the console. See `console.serving`."""

from __future__ import annotations

import os

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")
_django = get_asgi_application()

from console.serving.application import Application  # noqa: E402  # it reads the settings

application = Application(_django)
