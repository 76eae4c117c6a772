"""The settings of the tests: those of the console, with servers and folders under `var/test` that only tests use."""

import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

BASE = Path(__file__).resolve().parent.parent
os.environ.setdefault("TRAINYARD_IMAGES_ROOT", str(BASE / "var" / "images"))  # built once: it takes minutes
os.environ["REGISTRY_CHECKS"] = "0"  # no test asks a registry on the Internet
_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
os.environ["OPENID_PRIVATE_KEY"] = _key.private_bytes(
    Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()
).decode()
os.environ["TRAINYARD_VAR"] = str(BASE / "var" / "test")
for _name in (
    "DATABASE_URL", "REDIS_URL", "TRAINYARD_URL", "STRIPE_SECRET_KEY", "RUNTIME_BACKEND", "TRAINYARD_CLUSTERS", "DEBUG",
    "OIDC_PROVIDERS", "SAML_PROVIDERS",
):  # fmt: skip
    os.environ.pop(_name, None)

from console.settings import *  # noqa: E402, F403
from console.settings import CACHES, DATABASES, INSTALLED_APPS, MIDDLEWARE, STORAGES  # noqa: E402

# Two people, or two terminals, may test at once on the same servers: each process has a database of its own.
DATABASES["default"]["TEST"] = {"NAME": f"test_{os.getpid()}"}
DATABASES["default"]["CONN_MAX_AGE"] = 0
CACHES["default"]["KEY_PREFIX"] = f"test_{os.getpid()}"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # fast: tests create many users
STORAGES["staticfiles"] = {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"}
MIDDLEWARE.remove("console.serving.static.StaticMiddleware")  # it warns about the folder that collectstatic makes
INSTALLED_APPS.append("console.accounts.saml")  # its addresses; no test but those of SAML names a provider
