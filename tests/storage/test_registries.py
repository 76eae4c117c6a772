"""Registries of images, and their passwords: encrypted, and found by the host of a reference."""

import pytest

from storage import registries
from storage.models import Registry
from tests.storage.refusals import refused_fields

pytestmark = pytest.mark.django_db


def test_a_password_is_stored_encrypted_and_survives_a_rotated_secret_key(owner, stranger, settings):
    saved = registries.save_registry(
        organization=owner.organization, host="Registry.Example.com:5000", username="me", password="hunter2"
    )
    assert saved.host == "registry.example.com:5000"
    stored = bytes(Registry.objects.get().secret)
    assert b"hunter2" not in stored
    reference = "registry.example.com:5000/team/image:1"
    registry = registries.registry_for(organization=owner.organization, reference=reference)
    assert registry is not None
    assert registries.password_of(registry) == "hunter2"
    assert registries.registry_for(organization=stranger.organization, reference=reference) is None
    old, settings.SECRET_KEY = settings.SECRET_KEY, "another-key"
    assert registries.password_of(registry) == ""  # the password cannot be decrypted
    settings.SECRET_KEY_FALLBACKS = [old]
    assert registries.password_of(registry) == "hunter2"
    registries.save_registry(organization=owner.organization, host=saved.host)  # no password
    assert registries.password_of(Registry.objects.get()) == ""


def test_invalid_hosts_are_refused(owner):
    for host in ("", "https://a.b", "a.b/c", "a b", "-a", "a" * 252 + ":5000"):
        assert refused_fields(registries.save_registry, organization=owner.organization, host=host) == ["host"], host
