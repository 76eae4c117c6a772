"""Parse the setting NOTEBOOK_URL. Each notebook has a host name of its own below the URL's host name.

`console.serving.notebooks` serves the notebooks.

An invalid value stops the process at start.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from django.core.exceptions import ImproperlyConfigured

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
"""The host names by which a console is reached only from its own machine."""


def default(console_url: str) -> str:
    """Return the URL that applies where NOTEBOOK_URL is not set; empty: the console offers no notebooks.

    If the host of `console_url` is one of LOCAL_HOSTS, notebooks get names below `localhost`, because browsers resolve
    each of these to their own machine. With any other host there are none, because their names would need DNS records
    and a certificate.
    """
    console = urlsplit(console_url)
    is_local = console.hostname in LOCAL_HOSTS and console.scheme == "http"
    return f"http://localhost:{console.port or 80}" if is_local else ""


def parse(text: str, *, console_url: str) -> str:
    """Validate the setting's value `text`, and return it. Raises ImproperlyConfigured.

    It is a scheme and a host name, perhaps with a port; empty: the console offers no notebooks.
    """
    if not text:
        return ""
    console, url = urlsplit(console_url), urlsplit(text)
    if url.scheme != console.scheme:
        raise ImproperlyConfigured(
            f"NOTEBOOK_URL is '{text}'. It must be {console.scheme}:// and a host name, as TRAINYARD_URL, "
            f"such as {console.scheme}://notebooks.example.net."
        )
    # A console at `localhost` has its notebooks below `localhost` by default, so LOCAL_HOSTS are not refused.
    if console.hostname and f".{console.hostname}".endswith(f".{url.hostname}") and url.hostname not in LOCAL_HOSTS:
        raise ImproperlyConfigured(
            f"NOTEBOOK_URL is '{text}'. The console must not be below this host name: notebooks could set its cookies."
        )
    # Browsers leave out the default port in a request's host, with which the server compares the host of this URL.
    netloc = url.netloc.removesuffix(":443" if url.scheme == "https" else ":80")
    return f"{url.scheme}://{netloc}"
