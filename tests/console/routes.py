"""Every route that the console serves."""

from django.urls import URLPattern, get_resolver


def routes_of(urls=None):
    """Yield the route and the pattern of each URL, in all included lists; `urls` is a module, by default the root."""
    return _routes_below(get_resolver(urls), "")


def _routes_below(resolver, prefix):
    for entry in resolver.url_patterns:
        route = prefix + str(entry.pattern)
        if isinstance(entry, URLPattern):
            yield route, entry
        else:
            yield from _routes_below(entry, route)
