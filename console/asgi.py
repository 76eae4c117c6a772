"""The ASGI application: the same URLs and views as WSGI serves, for event streams. See `console.live`."""

import os

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")

application = get_asgi_application()
