"""Static files, served by WhiteNoise."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from whitenoise.middleware import WhiteNoiseMiddleware
from whitenoise.storage import CompressedManifestStaticFilesStorage


class StaticStorage(CompressedManifestStaticFilesStorage):  # type: ignore[misc]  # WhiteNoise publishes no types
    """Names each file by its hash, also in the imports of JavaScript modules, so that browsers may always cache it."""

    support_js_module_import_aggregation = True


class StaticMiddleware(WhiteNoiseMiddleware):  # type: ignore[misc]  # WhiteNoise publishes no types
    """WhiteNoise with responses in memory.

    WhiteNoise itself returns streams, and for each stream `console.serving.streams` would start a thread.
    """

    @staticmethod
    def serve(static_file: Any, request: HttpRequest) -> HttpResponse:
        """Return the response: the file, its requested range, or 304 if the client has the file."""
        file_response = static_file.get_response(request.method, request.META)
        content = b""
        if file_response.file is not None:
            with file_response.file as file:
                content = file.read()
        response = HttpResponse(content, status=int(file_response.status))
        del response["Content-Type"]  # Django's default; a 304 must have none, and files get WhiteNoise's
        for name, value in file_response.headers:
            response[name] = value
        return response
