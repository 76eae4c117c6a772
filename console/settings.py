"""The settings: the only reader of the environment. The one rule: with nothing set, all works on this machine alone.

Every variable is documented in `docs/operator-guide.md`.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import environ
from csp.constants import NONCE, NONE, SELF
from django.utils.translation import gettext_lazy as _
from whitenoise.compress import Compressor

from console import clusters
from console.operations import logs
from console.services import Embedded

BASE_DIR = Path(__file__).resolve().parent.parent
env = environ.Env()


def _secret_key(folder: Path) -> str:
    """The key of this installation: made once, kept beside its data, readable by its owner alone."""
    path = folder / "secret_key"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = folder / f"secret_key.{secrets.token_hex(4)}"
        fresh.touch(mode=0o600)
        fresh.write_text(secrets.token_urlsafe(64))
        try:
            path.hardlink_to(fresh)
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    return path.read_text().strip()


# --- Where things lie ------------------------------------------------------------------------------------------------
VAR_DIR: Path = Path(env.str("TRAINYARD_VAR", str(BASE_DIR / "var"))).resolve()
EMBEDDED = Embedded(VAR_DIR)
TRAINYARD_URL: str = env.str("TRAINYARD_URL", "http://127.0.0.1:8000").rstrip("/")
WEB_BIND: str = env.str("WEB_BIND", f"127.0.0.1:{urlsplit(TRAINYARD_URL).port or 8000}")
TRAINYARD_STORAGE_ROOT: Path = Path(env.str("TRAINYARD_STORAGE_ROOT", str(VAR_DIR / "storage")))
TRAINYARD_RUNS_ROOT: Path = Path(env.str("TRAINYARD_RUNS_ROOT", str(VAR_DIR / "runs")))
TRAINYARD_IMAGES_ROOT: Path = Path(env.str("TRAINYARD_IMAGES_ROOT", str(VAR_DIR / "images")))
TRAINYARD_LIVE_SOCKET: Path = EMBEDDED.socket_dir / "live.sock"

# --- Django ----------------------------------------------------------------------------------------------------------
SECRET_KEY: str = env.str("SECRET_KEY", "") or _secret_key(VAR_DIR)
DEBUG: bool = env.bool("DEBUG", False)
ALLOWED_HOSTS: list[str] = env.list("ALLOWED_HOSTS", default=["127.0.0.1", "localhost", "[::1]"])
_host = urlsplit(TRAINYARD_URL).hostname
if _host and _host not in ALLOWED_HOSTS:
    ALLOWED_HOSTS.append(_host)
CSRF_TRUSTED_ORIGINS = [TRAINYARD_URL]
HTTPS = TRAINYARD_URL.startswith("https://")
SECURE_SSL_REDIRECT = SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = HTTPS
SECURE_HSTS_SECONDS = 31_536_000 if HTTPS else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = HTTPS
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if HTTPS else None
SECURE_REDIRECT_EXEMPT = [r"^healthz$", r"^readyz$", r"^metrics$"]
SESSION_COOKIE_AGE = 14 * 24 * 3600
X_FRAME_OPTIONS = "DENY"

INSTALLED_APPS = [
    "unfold",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "console.apps.StaticFiles",
    "django.contrib.humanize",
    "allauth",
    "allauth.account",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "django_filters",
    "django_htmx",
    "csp",
    "console",
    "console.accounts",
    "console.web",
    "billing",
    "storage",
    "jobs",
]
MIDDLEWARE = [
    "console.operations.requests.RequestMiddleware",
    "billing.webhooks.WebhookMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "console.accounts.middleware.QueryMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "allauth.account.middleware.AccountMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "console.accounts.middleware.OrganizationMiddleware",
]
ROOT_URLCONF = "console.urls"
WSGI_APPLICATION = "console.wsgi.application"
ASGI_APPLICATION = "console.asgi.application"
APPEND_SLASH = True
TEMPLATES: list[dict[str, Any]] = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "console.web.navigation.context",
            ],
        },
    }
]

# --- Data ------------------------------------------------------------------------------------------------------------
DATABASES = {"default": env.db_url_config(env.str("DATABASE_URL", EMBEDDED.database_url))}
DATABASES["default"] |= {"ENGINE": "console.database", "CONN_MAX_AGE": 600, "CONN_HEALTH_CHECKS": True}
if env.bool("DATABASE_PREPARED_STATEMENTS", True):
    # A statement that a connection sends often is planned once and not each time: half of what PostgreSQL has to do.
    DATABASES["default"].setdefault("OPTIONS", {}).update(server_side_binding=True, prepare_threshold=5)
REDIS_URL: str = env.str("REDIS_URL", EMBEDDED.redis_url)
EMBEDDED_DATABASE = "DATABASE_URL" not in env.ENVIRON
EMBEDDED_REDIS = "REDIS_URL" not in env.ENVIRON
CACHES = {"default": {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": REDIS_URL}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# --- Celery: a message is only a hint, the rows are the truth ---------------------------------------------------------
CELERY_BROKER_URL = REDIS_URL.replace("unix://", "redis+socket://").replace("?db=", "?virtual_host=")
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None
CELERY_BROKER_TRANSPORT_OPTIONS = {"visibility_timeout": 3600}
CELERY_BEAT_SCHEDULE = {
    "reconcile": {"task": "jobs.tasks.reconcile", "schedule": 5.0, "options": {"expires": 5}},
    "forget-runs": {"task": "jobs.tasks.forget_runs", "schedule": 3600.0},
    "expire-quotes": {"task": "billing.tasks.expire_quotes", "schedule": 3600.0},
    "apply-events": {"task": "billing.tasks.apply_events", "schedule": 15.0, "options": {"expires": 15}},
    "buy-paid": {"task": "jobs.paid.buy_paid", "schedule": 15.0, "options": {"expires": 15}},
    "move-money": {"task": "billing.tasks.move_money", "schedule": 60.0, "options": {"expires": 60}},
    "fetch-events": {"task": "billing.tasks.fetch_events", "schedule": 3600.0},
    "watch-money": {"task": "billing.tasks.watch_money", "schedule": 60.0, "options": {"expires": 60}},
    "check-books": {"task": "billing.tasks.check_books", "schedule": 600.0, "options": {"expires": 600}},
    "write-invoices": {"task": "billing.tasks.write_invoices", "schedule": 3600.0},
    "sweep-storage": {"task": "storage.tasks.sweep", "schedule": 3600.0},
}

# --- Who -------------------------------------------------------------------------------------------------------------
AUTH_USER_MODEL = "accounts.User"
AUTHENTICATION_BACKENDS = [
    "django.contrib.auth.backends.ModelBackend",
    "allauth.account.auth_backends.AuthenticationBackend",
]
PASSWORD_HASHERS = [
    "django.contrib.auth.hashers.Argon2PasswordHasher",
    "django.contrib.auth.hashers.PBKDF2PasswordHasher",
]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in ("UserAttributeSimilarityValidator", "MinimumLengthValidator", "CommonPasswordValidator")
]
LOGIN_URL = "account_login"
LOGIN_REDIRECT_URL = "/"
ACCOUNT_ADAPTER = "console.accounts.adapter.AccountAdapter"
ACCOUNT_LOGIN_METHODS = {"email"}
ACCOUNT_SIGNUP_FORM_CLASS = "console.accounts.forms.SignUpForm"
ACCOUNT_SIGNUP_FIELDS = ["email*", "password1*", "password2*"]
ACCOUNT_USER_MODEL_USERNAME_FIELD = None
ACCOUNT_EMAIL_VERIFICATION = env.str("EMAIL_VERIFICATION", "optional")
ACCOUNT_EMAIL_SUBJECT_PREFIX = "[Trainyard] "
ACCOUNT_LOGOUT_ON_GET = False
ACCOUNT_SESSION_REMEMBER = True
TERMS_VERSION = "2026-11"

# --- API -------------------------------------------------------------------------------------------------------------
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "console.accounts.authentication.TokenAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["console.accounts.access.HasCapability"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_FILTER_BACKENDS": ["django_filters.rest_framework.DjangoFilterBackend"],
    "DEFAULT_PAGINATION_CLASS": "console.accounts.pagination.NewestFirst",
    "DEFAULT_SCHEMA_CLASS": "console.accounts.schema.Schema",
    "EXCEPTION_HANDLER": "console.api.exception_handler",
    "DEFAULT_THROTTLE_RATES": {"anonymous": "60/min"},
    "PAGE_SIZE": 50,
    "TEST_REQUEST_DEFAULT_FORMAT": "json",
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Trainyard API",
    "DESCRIPTION": "Buy distributed training and watch it run. Authenticate with `Authorization: Token <token>`.",
    "VERSION": "1",
    "SERVE_INCLUDE_SCHEMA": False,
    "SERVE_PERMISSIONS": ["rest_framework.permissions.AllowAny"],
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "COMPONENT_SPLIT_REQUEST": True,
    "ENUM_NAME_OVERRIDES": {"InvoiceKindEnum": "billing.models.Invoice.Kinds"},
}

# --- Money -----------------------------------------------------------------------------------------------------------
CURRENCY: str = env.str("CURRENCY", "USD")
STRIPE_SECRET_KEY: str = env.str("STRIPE_SECRET_KEY", "")
STRIPE_WEBHOOK_SECRETS: list[str] = env.list("STRIPE_WEBHOOK_SECRETS", default=[])
SANDBOX_PORT: int = env.int("SANDBOX_PORT", (urlsplit(TRAINYARD_URL).port or 8000) + 1)
SANDBOX_URL: str = f"http://127.0.0.1:{SANDBOX_PORT}"
PAYMENTS_SANDBOX: bool = not STRIPE_SECRET_KEY
QUOTE_TTL_SECONDS: int = env.int("QUOTE_TTL_SECONDS", 1800)
TOP_UP_MINIMUM_MINOR: int = env.int("TOP_UP_MINIMUM_MINOR", 500)
TOP_UP_MAXIMUM_MINOR: int = env.int("TOP_UP_MAXIMUM_MINOR", 1_000_000)

# --- Runs ------------------------------------------------------------------------------------------------------------
TRAINYARD_CLUSTERS = clusters.parse(env.str("TRAINYARD_CLUSTERS", ""), backend=env.str("RUNTIME_BACKEND", "local"))
LOCAL_CPUS: float | None = env.float("LOCAL_CPUS", None)
LOCAL_MEMORY_MIB: int | None = env.int("LOCAL_MEMORY_MIB", None)
LOCAL_DISK_MIB: int = env.int("LOCAL_DISK_MIB", 51200)
LOCAL_WARM_SECONDS: float = env.float("LOCAL_WARM_SECONDS", 1800)
TRAINYARD_RUN_NETWORK: str = env.str("TRAINYARD_RUN_NETWORK", "private")
MAX_UPLOAD_BYTES: int = env.int("MAX_UPLOAD_BYTES", 20 * 1024**3)
MAX_ARCHIVE_FILES: int = env.int("MAX_ARCHIVE_FILES", 2_000_000)
MAX_FILE_BYTES: int = env.int("MAX_FILE_BYTES", 1024**3)
DATA_UPLOAD_MAX_MEMORY_SIZE = 5 * 1024**2

# --- Language, mail, files -------------------------------------------------------------------------------------------
LANGUAGE_CODE = "en"
LANGUAGES = [("en", _("English")), ("zh-hans", _("Simplified Chinese"))]
LOCALE_PATHS = [BASE_DIR / "locale"]
TIME_ZONE = env.str("TIME_ZONE", "UTC")
USE_TZ = True
EMAIL_CONFIG = env.email_url("EMAIL_URL", default="consolemail://")
vars().update(EMAIL_CONFIG)
DEFAULT_FROM_EMAIL = env.str("DEFAULT_FROM_EMAIL", "Trainyard <noreply@localhost>")
STATIC_URL = "/static/"
STATIC_ROOT: Path = Path(env.str("TRAINYARD_STATIC_ROOT", str(VAR_DIR / "static")))
STATICFILES_DIRS = [BASE_DIR / "static"]
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "whitenoise.storage.CompressedManifestStaticFilesStorage"},
}
WHITENOISE_USE_FINDERS = DEBUG
WHITENOISE_SKIP_COMPRESS_EXTENSIONS = [*Compressor.SKIP_COMPRESS_EXTENSIONS, "map"]
CONTENT_SECURITY_POLICY = {
    "EXCLUDE_URL_PREFIXES": ["/admin/", "/api/v1/docs/"],
    "DIRECTIVES": {
        "default-src": [SELF],
        "script-src": [SELF, NONCE],
        "style-src": [SELF, "'unsafe-inline'"],
        "img-src": [SELF, "data:"],
        "font-src": [SELF],
        "connect-src": [SELF],
        "object-src": [NONE],
        "base-uri": [SELF],
        "frame-ancestors": [NONE],
        # a form of ours may end, by redirect, at the page where one pays
        "form-action": [SELF, SANDBOX_URL if PAYMENTS_SANDBOX else "https://checkout.stripe.com"],
    },
}
UNFOLD = {
    "SITE_TITLE": "Trainyard administration",
    "SITE_HEADER": "Trainyard",
    "SITE_SYMBOL": "train",
    "DASHBOARD_CALLBACK": "console.operations.health.dashboard",
}

# --- Operations ------------------------------------------------------------------------------------------------------
LOGGING = logs.configuration(form=env.str("LOG_FORMAT", "text"), level=env.str("LOG_LEVEL", "INFO"))
METRICS_TOKEN: str = env.str("METRICS_TOKEN", "")
OTEL_EXPORTER_OTLP_ENDPOINT: str = env.str("OTEL_EXPORTER_OTLP_ENDPOINT", "")
