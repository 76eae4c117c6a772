"""Parse the settings of sign-up, of single sign-on, and of the console as an OpenID provider.

An invalid value stops the process at start.
"""

from __future__ import annotations

import importlib
import json
import re
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from django.core.exceptions import ImproperlyConfigured

OIDC_FIELDS = ("id", "name", "server_url", "client_id", "client_secret")
SAML_FIELDS = ("id", "name", "entity_id", "sso_url", "certificate")
SAML_OPTIONAL_FIELDS = ("verified_domains", "id_attribute", "email_attribute", "allow_idp_initiated")
"""The required fields of an object in OIDC_PROVIDERS, which may also have `verified_domains`; then the required and the
optional fields of an object in SAML_PROVIDERS."""
SAML_MODULE = "onelogin.saml2.auth"
"""A module of python3-saml, which allauth uses. It is not installed everywhere, because it needs C libraries."""
SAML_ID_ATTRIBUTES = [
    "urn:oasis:names:tc:SAML:attribute:subject-id",
    "urn:oasis:names:tc:SAML:attribute:pairwise-id",
]
"""The attributes by which a provider identifies a person permanently (OASIS's profile of subject identifiers). If an
assertion has neither, allauth uses its NameID."""
SAML_EMAIL_ATTRIBUTES = [
    "urn:oid:0.9.2342.19200300.100.1.3",
    "http://schemas.xmlsoap.org/ws/2005/05/identity/claims/emailaddress",
    "email",
    "mail",
]
"""The names that an attribute with the e-mail address may have: LDAP's, Microsoft's, and two that administrators often
choose."""
MAX_ENTITY_ID_LENGTH = 200
"""The length of the column `provider` of allauth's accounts, which stores the entity ID."""
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
"""The hosts for which http:// is allowed, for tests and trials: in providers' URLs, and in redirect URIs of clients."""

MIN_KEY_BITS = 2048
"""The shortest RSA key for signing ID tokens that RFC 7518 allows."""

SIGNUP_RULES = ("open", "approval", "closed")
"""Who may sign up: everybody, everybody whose account an administrator approves, or nobody."""


def parse_oidc_providers(text: str) -> list[dict[str, Any]]:
    """Return the OpenID Connect providers of a JSON list as allauth's `APPS`. Raises ImproperlyConfigured."""
    return [
        _parse_oidc_provider(entry)
        for entry in _parse_entries("OIDC_PROVIDERS", text, OIDC_FIELDS, ("verified_domains",))
    ]


def _parse_oidc_provider(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return one OpenID Connect provider as an entry of allauth's `APPS`. Raises ImproperlyConfigured."""
    _require_https("OIDC_PROVIDERS", data, "server_url")
    return {
        "provider_id": data["id"],
        "name": data["name"],
        "client_id": data["client_id"],
        "secret": data["client_secret"],
        "settings": {
            "server_url": data["server_url"].rstrip("/"),
            "verified_email": _parse_verified_domains("OIDC_PROVIDERS", data),
        },
    }


def parse_saml_providers(text: str, *, console_url: str) -> list[dict[str, Any]]:
    """Return the SAML identity providers of a JSON list as allauth's `APPS`. Raises ImproperlyConfigured.

    The console has a separate entity ID for each provider: the URL of the console's metadata, below `console_url`.
    """
    entries = _parse_entries("SAML_PROVIDERS", text, SAML_FIELDS, SAML_OPTIONAL_FIELDS)
    if entries:
        _load_saml_packages()
    if len({entry["entity_id"] for entry in entries}) < len(entries):
        raise ImproperlyConfigured("SAML_PROVIDERS: each provider needs an `entity_id` of its own.")
    return [_parse_saml_provider(entry, console_url) for entry in entries]


def _parse_saml_provider(data: Mapping[str, Any], console_url: str) -> dict[str, Any]:
    """Return one SAML identity provider as an entry of allauth's `APPS`. Raises ImproperlyConfigured."""
    # allauth stores the accounts of a SAML provider under its entity ID, and those of an OpenID Connect provider under
    # its `id`. A URI cannot equal such an `id`, so no provider can log people in to the accounts of another.
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*:\S+", data["entity_id"]):
        raise ImproperlyConfigured(f"SAML_PROVIDERS: the `entity_id` of {data['id']} must be a URI.")
    if len(data["entity_id"]) > MAX_ENTITY_ID_LENGTH:
        raise ImproperlyConfigured(
            f"SAML_PROVIDERS: the `entity_id` of {data['id']} has more than {MAX_ENTITY_ID_LENGTH} characters."
        )
    _require_https("SAML_PROVIDERS", data, "sso_url")
    for name in ("id_attribute", "email_attribute"):
        if not isinstance(data.get(name, ""), str):
            raise ImproperlyConfigured(f"SAML_PROVIDERS: `{name}` of {data['id']} is the name of an attribute.")
    allows_idp_initiated = data.get("allow_idp_initiated", False)
    if not isinstance(allows_idp_initiated, bool):
        raise ImproperlyConfigured("SAML_PROVIDERS: `allow_idp_initiated` is true or false.")
    return {
        "provider_id": data["entity_id"],
        "name": data["name"],
        "client_id": data["id"],  # allauth uses it in the provider's URLs: /accounts/saml/<client_id>/
        "settings": {
            "verified_email": _parse_verified_domains("SAML_PROVIDERS", data),
            "idp": {
                "entity_id": data["entity_id"],
                "sso_url": data["sso_url"],
                "x509cert": _parse_certificate(data),
            },
            "sp": {"entity_id": f"{console_url}/accounts/saml/{data['id']}/metadata/"},
            "attribute_mapping": {
                "uid": [data["id_attribute"]] if data.get("id_attribute") else SAML_ID_ATTRIBUTES,
                "email": [data["email_attribute"]] if data.get("email_attribute") else SAML_EMAIL_ATTRIBUTES,
            },
            "advanced": {
                "strict": True,
                "want_assertion_signed": True,
                "want_attribute_statement": False,  # a provider may send the NameID alone
                "reject_deprecated_algorithm": True,
                "allow_single_label_domains": True,  # a host in an internal network, such as https://trainyard/
                "reject_idp_initiated_sso": not allows_idp_initiated,
            },
        },
    }


def _load_saml_packages() -> None:
    """Import python3-saml, so that a missing package stops the process now. Raises ImproperlyConfigured."""
    try:
        importlib.import_module(SAML_MODULE)
    except ImportError as error:
        raise ImproperlyConfigured(
            f"SAML_PROVIDERS needs packages that are not installed ({error}). "
            "Install them: .venv/bin/uv pip install --require-hashes -r requirements/production.txt"
        ) from None
    except Exception as error:  # a failed import of xmlsec raises its own class, which cannot be imported then
        raise ImproperlyConfigured(
            f"SAML_PROVIDERS: the packages lxml and xmlsec do not work together ({error}). "
            "Install the versions of requirements/production.txt."
        ) from error


def _parse_certificate(data: Mapping[str, Any]) -> str:
    """Return the certificate of a SAML provider as PEM. The setting has it as PEM, or as PEM's base64 text alone.

    Raises ImproperlyConfigured.
    """
    text: str = data["certificate"].strip()
    if not text.startswith("-----"):
        text = f"{ssl.PEM_HEADER}\n{text}\n{ssl.PEM_FOOTER}"
    try:
        x509.load_pem_x509_certificate(text.encode())
    except ValueError:
        raise ImproperlyConfigured(
            f"SAML_PROVIDERS: the `certificate` of {data['id']} is no X.509 certificate in PEM or base64."
        ) from None
    return text


def _parse_entries(
    setting: str, text: str, required: tuple[str, ...], optional: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Return the objects of a JSON list, the value of the setting named `setting`; empty if `text` is empty.

    Raises ImproperlyConfigured unless each has all required fields, no unknown fields, and its own `id`.
    """
    if not text.strip():
        return []
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ImproperlyConfigured(f"{setting} is no JSON: {error}.") from None
    if not isinstance(data, list) or not all(isinstance(entry, dict) for entry in data):
        raise ImproperlyConfigured(f"{setting} must be a JSON list of objects, one for each provider.")
    for entry in data:
        for name in required:
            if not isinstance(entry.get(name), str) or not entry[name]:
                raise ImproperlyConfigured(f"{setting}: each provider needs `{name}`, a text.")
        if unknown := sorted(set(entry) - {*required, *optional}):
            raise ImproperlyConfigured(f"{setting}: `{unknown[0]}` is not known. There are: {required + optional}.")
        if not re.fullmatch(r"[a-z0-9-]{1,40}", entry["id"]):
            raise ImproperlyConfigured(f"{setting}: an `id` has 1 to 40 lower-case letters, digits and dashes.")
    if len({entry["id"] for entry in data}) < len(data):
        raise ImproperlyConfigured(f"{setting}: each provider needs an `id` of its own.")
    return data


def _require_https(setting: str, data: Mapping[str, Any], name: str) -> None:
    """Raise ImproperlyConfigured unless the URL in the field `name` begins with https://, or is on this machine."""
    try:
        url = urlsplit(data[name])
    except ValueError as error:
        raise ImproperlyConfigured(f"{setting}: the `{name}` of {data['id']} is not a URL: {error}.") from None
    if url.scheme != "https" and not (url.scheme == "http" and url.hostname in LOCAL_HOSTS):
        raise ImproperlyConfigured(f"{setting}: the `{name}` of {data['id']} must begin with https://.")


def _parse_verified_domains(setting: str, data: Mapping[str, Any]) -> list[str]:
    """Return the email domains whose addresses this provider may report as verified. Raises ImproperlyConfigured."""
    domains = data.get("verified_domains", [])
    if not isinstance(domains, list) or not all(isinstance(domain, str) for domain in domains):
        raise ImproperlyConfigured(f"{setting}: `verified_domains` is a list of mail domains.")
    return domains


def origins(providers: list[dict[str, Any]]) -> list[str]:
    """Return the origins of some providers (entries of `APPS`).

    Forms of the log-in page redirect there, which the Content-Security-Policy must allow.
    """
    settings_of_providers = [provider["settings"] for provider in providers]
    urls = [
        urlsplit(settings["idp"]["sso_url"] if "idp" in settings else settings["server_url"])
        for settings in settings_of_providers
    ]
    return sorted({f"{url.scheme}://{url.netloc}" for url in urls})


def parse_private_key(text: str) -> str:
    """Return the PEM of the RSA key that signs ID tokens; empty if the console is no OpenID provider.

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
