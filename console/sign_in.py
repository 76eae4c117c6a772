"""Parse the settings of sign-up and of OpenID Connect, in both directions. Errors stop the process at start."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from django.core.exceptions import ImproperlyConfigured

REQUIRED_FIELDS = ("id", "name", "server_url", "client_id", "client_secret")
OPTIONAL_FIELDS = ("verified_domains",)
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
"""Hosts whose provider may use http, for tests and trials."""

MIN_KEY_BITS = 2048
"""The shortest RSA key that signs ID tokens, as RFC 7518 asks."""

SIGNUP_RULES = ("open", "approval", "closed")


def parse_signup(text: str) -> str:
    """Return who may sign up: one of SIGNUP_RULES. Raises ImproperlyConfigured."""
    if text not in SIGNUP_RULES:
        raise ImproperlyConfigured(f"SIGNUP is '{text}'. It must be one of: {', '.join(SIGNUP_RULES)}.")
    return text


def parse_providers(text: str) -> list[dict[str, Any]]:
    """Return the providers of a JSON list as allauth's `APPS`. Raises ImproperlyConfigured."""
    if not text.strip():
        return []
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ImproperlyConfigured(f"OIDC_PROVIDERS is no JSON: {error}.") from None
    if not isinstance(data, list) or not all(isinstance(entry, Mapping) for entry in data):
        raise ImproperlyConfigured("OIDC_PROVIDERS must be a JSON list of objects, one for each provider.")
    providers = [_provider(entry) for entry in data]
    if len({provider["provider_id"] for provider in providers}) < len(providers):
        raise ImproperlyConfigured("OIDC_PROVIDERS: each provider needs an `id` of its own.")
    return providers


def _provider(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return one provider as an entry of allauth's `APPS`. Raises ImproperlyConfigured."""
    for name in REQUIRED_FIELDS:
        if not isinstance(data.get(name), str) or not data[name]:
            raise ImproperlyConfigured(f"OIDC_PROVIDERS: each provider needs `{name}`, a text.")
    known = REQUIRED_FIELDS + OPTIONAL_FIELDS
    if unknown := sorted(set(data) - set(known)):
        raise ImproperlyConfigured(f"OIDC_PROVIDERS: `{unknown[0]}` is not known. There are: {known}.")
    if not re.fullmatch(r"[a-z0-9-]{1,40}", data["id"]):
        raise ImproperlyConfigured("OIDC_PROVIDERS: an `id` has 1 to 40 lower-case letters, digits and dashes.")
    url = urlsplit(data["server_url"])
    if url.scheme != "https" and not (url.scheme == "http" and url.hostname in LOCAL_HOSTS):
        raise ImproperlyConfigured(f"OIDC_PROVIDERS: the `server_url` of {data['id']} must begin with https://.")
    domains = data.get("verified_domains", [])
    if not isinstance(domains, list) or not all(isinstance(domain, str) for domain in domains):
        raise ImproperlyConfigured("OIDC_PROVIDERS: `verified_domains` is a list of mail domains.")
    return {
        "provider_id": data["id"],
        "name": data["name"],
        "client_id": data["client_id"],
        "secret": data["client_secret"],
        "settings": {"server_url": data["server_url"].rstrip("/"), "verified_email": domains},
    }


def origins(providers: list[dict[str, Any]]) -> list[str]:
    """Return the origins of the providers, to which the log-in forms redirect."""
    urls = [urlsplit(provider["settings"]["server_url"]) for provider in providers]
    return sorted({f"{url.scheme}://{url.netloc}" for url in urls})


def parse_private_key(text: str) -> str:
    """Return the PEM of the RSA key that signs ID tokens; empty: the console is no provider.

    Raises ImproperlyConfigured.
    """
    if not text.strip():
        return ""
    try:
        key = load_pem_private_key(text.encode(), password=None)
    except (ValueError, TypeError):
        raise ImproperlyConfigured("OPENID_PRIVATE_KEY is no private key. Create one: openssl genrsa 2048") from None
    if not isinstance(key, RSAPrivateKey) or key.key_size < MIN_KEY_BITS:
        raise ImproperlyConfigured(f"OPENID_PRIVATE_KEY must be an RSA key of at least {MIN_KEY_BITS} bits.")
    return text
