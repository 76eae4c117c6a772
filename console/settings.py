"""Django's settings. Only this module reads the environment. Without any variable, everything runs on this machine.

`docs/operator-guide/settings.md` documents every variable.
"""

from __future__ import annotations

import gc
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from csp.constants import NONE, SELF, UNSAFE_EVAL, UNSAFE_INLINE
from django.utils.translation import gettext_lazy as _
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry
from whitenoise.compress import Compressor

from console import admin_theme, clusters, notebook_url, sign_in
from console.environment import MAX_PORT, Environment, host_of, neighbouring_port
from console.observability import addresses, logs
from console.supervision.embedded import Embedded

# By default Python looks for garbage after every 700 new objects. While a process starts, its imports create hundreds
# of thousands of objects, and none of them is garbage: with the default, the search takes 7 % of the start.
gc.set_threshold(20_000)

BASE_DIR = Path(__file__).resolve().parent.parent
env = Environment()


def _read_or_create_secret_key(folder: Path) -> str:
    """Return the key that this installation generated for itself; generate it at the first start.

    It is in a file in `folder`, which holds the installation's data. Only the owner of the file can read it.
    """
    path = folder / "secret_key"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        new_file = folder / f"secret_key.{secrets.token_hex(4)}"
        new_file.touch(mode=0o600)
        new_file.write_text(secrets.token_urlsafe(64))
        try:
            path.hardlink_to(new_file)  # atomic: if several processes start at once, only one creates the key
        except FileExistsError:
            pass
        finally:
            new_file.unlink()
    return path.read_text().strip()


# --- Paths and addresses ---------------------------------------------------------------------------------------------
VAR_DIR: Path = Path(env.str("TRAINYARD_VAR", str(BASE_DIR / "var"))).resolve()
EMBEDDED = Embedded(VAR_DIR)
TRAINYARD_URL: str = env.web_address("TRAINYARD_URL", "http://127.0.0.1:8000")
NOTEBOOK_URL: str = notebook_url.parse(
    env.web_address("NOTEBOOK_URL", notebook_url.default(TRAINYARD_URL), can_be_empty=True), console_url=TRAINYARD_URL
)
"""Each notebook is served at a subdomain of this URL's host; empty: there are no notebooks."""
WEB_BIND: str = env.bind_address("WEB_BIND", f"127.0.0.1:{urlsplit(TRAINYARD_URL).port or 8000}")
TRAINYARD_STORAGE_ROOT: Path = Path(env.str("TRAINYARD_STORAGE_ROOT", str(VAR_DIR / "storage")))
TRAINYARD_RUNS_ROOT: Path = Path(env.str("TRAINYARD_RUNS_ROOT", str(VAR_DIR / "runs")))
TRAINYARD_IMAGES_ROOT: Path = Path(env.str("TRAINYARD_IMAGES_ROOT", str(VAR_DIR / "images")))
TRAINYARD_PACKAGES_ROOT: Path = Path(env.str("TRAINYARD_PACKAGES_ROOT", str(VAR_DIR / "packages")))
TRAINYARD_IMAGE_FLAVOUR: str = env.choice("TRAINYARD_IMAGE_FLAVOUR", "auto", ("auto", "cpu", "cuda"))
"""auto, cpu or cuda: which builds of PyTorch and TensorFlow the built-in images get."""

# --- Django ----------------------------------------------------------------------------------------------------------
SECRET_KEY: str = env.str("SECRET_KEY", "") or _read_or_create_secret_key(VAR_DIR)
SECRET_KEY_FALLBACKS: list[str] = env.names("SECRET_KEY_FALLBACKS")
DEBUG: bool = env.switch("DEBUG", False)
ALLOWED_HOSTS: list[str] = env.names("ALLOWED_HOSTS", ["127.0.0.1", "localhost", "[::1]"])
if host_of(TRAINYARD_URL) not in ALLOWED_HOSTS:
    ALLOWED_HOSTS.append(host_of(TRAINYARD_URL))
CSRF_TRUSTED_ORIGINS = [TRAINYARD_URL]
CSRF_FAILURE_VIEW = "console.web.access.csrf_failure"
HTTPS = TRAINYARD_URL.startswith("https://")
SECURE_SSL_REDIRECT = SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = HTTPS
if HTTPS:
    # Browsers accept a cookie with this prefix only from the console's own host, and not from another subdomain.
    SESSION_COOKIE_NAME, CSRF_COOKIE_NAME = "__Host-sessionid", "__Host-csrftoken"
SECURE_HSTS_SECONDS = 365 * 24 * 3600 if HTTPS else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = HTTPS
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if HTTPS else None
TRUSTED_PROXIES = addresses.parse_networks(env.names("TRUSTED_PROXIES"))
# Kubernetes and Prometheus reach these paths inside the cluster, without TLS.
SECURE_REDIRECT_EXEMPT = [r"^healthz$", r"^readyz$", r"^metrics$"]
SESSION_COOKIE_AGE = 14 * 24 * 3600  # Django's default, which IDP_OIDC_REFRESH_TOKEN_EXPIRES_IN uses too
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
    "allauth.mfa",
    "allauth.usersessions",
    "allauth.socialaccount",
    "allauth.socialaccount.providers.openid_connect",
    "allauth.idp.oidc",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "django_filters",
    "django_htmx",
    "csp",
    "console",
    "console.installation",
    "console.accounts",
    "console.notifications",
    "console.web",
    "billing",
    "storage",
    "jobs",
]
# RequestMiddleware must be the first: it answers health checks, and the id that it gives a request must be in all log
# lines. Static files come before the session, which they do not need. The last three need the user.
MIDDLEWARE = [
    "console.monitoring.middleware.RequestMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "console.accounts.middleware.NulByteMiddleware",
    "console.serving.static.StaticMiddleware",
    "console.content_security.PolicyMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "allauth.account.middleware.AccountMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "console.accounts.middleware.TimeZoneMiddleware",
    "console.accounts.middleware.OrganizationMiddleware",
    "console.accounts.middleware.StaffMiddleware",
]
ROOT_URLCONF = "console.urls"
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
                "console.web.installation.context",
            ]
        },
    }
]

# --- Data ------------------------------------------------------------------------------------------------------------
DATABASES = {"default": env.database("DATABASE_URL", EMBEDDED.database_url)}
# Requests run on a fixed number of threads, so persistent connections serve as a pool. A connection that a restart of
# PostgreSQL broke is replaced. After ten minutes each is replaced, because its memory in PostgreSQL only grows.
DATABASES["default"] |= {"CONN_MAX_AGE": 600, "CONN_HEALTH_CHECKS": True}
if env.switch("DATABASE_PREPARED_STATEMENTS", True):
    # PostgreSQL then plans a statement once per connection, from the fifth execution on (psycopg's default), and not at
    # each execution. This halves PostgreSQL's load.
    DATABASES["default"].setdefault("OPTIONS", {}).update(server_side_binding=True, prepare_threshold=5)
REDIS_URL: str = env.redis_address("REDIS_URL", EMBEDDED.redis_url)
# `EMBEDDED` starts PostgreSQL unless the operator names another server, and likewise Redis.
EMBEDDED_DATABASE = "DATABASE_URL" not in env.ENVIRON
EMBEDDED_REDIS = "REDIS_URL" not in env.ENVIRON
# Replaces a connection that a restart of Redis broke. After a time-out a command is not repeated: Redis may have run
# it, and a second INCR would count twice.
RETRY_BROKEN = Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,))
CACHES: dict[str, dict[str, Any]] = {
    # Without these options, redis-py waits 5 s for a Redis that hangs, at each call. A request may make several calls.
    "default": {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": REDIS_URL,
        "OPTIONS": {"socket_timeout": 1, "socket_connect_timeout": 1, "retry": RETRY_BROKEN},
    },
    # In the memory of each process, for parts of pages that depend on few values: the template tag `cache` uses the
    # cache with this name. Most entries are rows of the list of jobs, of less than 2 KB: about 10 MB in all.
    "template_fragments": {
        "BACKEND": "django.core.cache.backends.locmem.LocMemCache",
        "LOCATION": "fragments",
        "OPTIONS": {"MAX_ENTRIES": 5000},
    },
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# --- Celery ----------------------------------------------------------------------------------------------------------
# Celery writes the URL of a Unix socket differently from redis-py.
CELERY_BROKER_URL = REDIS_URL.replace("unix://", "redis+socket://").replace("?db=", "?virtual_host=")
CELERY_TASK_IGNORE_RESULT = True
# A worker acknowledges a message after its task, so that the broker delivers the message of a killed worker again. All
# tasks are safe to repeat.
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
# A process takes no message that it cannot work on at once, so that another process can take it.
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_HIJACK_ROOT_LOGGER = False  # `console.observability.celery_signals` configures logging
# Workers wait for a broker that is down, at their start and later, without end.
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None
# A message that is not acknowledged for this many seconds is delivered again, although its task may still run. No task
# may take as long, unless it may run twice at once. The other options are for requests that send tasks: by default they
# would wait 6 s for a broker that is down, even without `retry`.
CELERY_BROKER_TRANSPORT_OPTIONS = {"visibility_timeout": 3600, "max_retries": 1, "interval_start": 0}
# Dispatch has its own queue and its own worker processes, so that no slow task delays the start of a job.
CELERY_TASK_DEFAULT_QUEUE = "celery"
CELERY_TASK_ROUTES = {"jobs.dispatch.dispatch": {"queue": "dispatch"}}
# The docstring of each task says what it does. `schedule` is the interval in seconds. A message of a frequent task
# `expires` when the next one is due, so that messages do not pile up while workers are down.
CELERY_BEAT_SCHEDULE = {
    "reconcile": {"task": "jobs.tasks.reconcile", "schedule": 5.0, "options": {"expires": 5}},
    "announce-deletions": {"task": "jobs.tasks.announce_deletions", "schedule": 3600.0},
    "advance-sweeps": {"task": "jobs.sweeps.progress.advance_sweeps", "schedule": 3.0, "options": {"expires": 3}},
    "install-packages": {"task": "jobs.tasks.install_packages", "schedule": 5.0, "options": {"expires": 5}},
    "remove-unused-packages": {"task": "jobs.tasks.remove_unused_packages", "schedule": 3600.0},
    "complete-closures": {"task": "jobs.tasks.complete_closures", "schedule": 300.0, "options": {"expires": 300}},
    "charge-storage": {"task": "jobs.tasks.charge_storage", "schedule": 3600.0},
    "forget-runs": {"task": "jobs.tasks.forget_runs", "schedule": 3600.0},
    "expire-quotes": {"task": "billing.tasks.expire_quotes", "schedule": 3600.0},
    "apply-events": {"task": "billing.tasks.apply_events", "schedule": 15.0, "options": {"expires": 15}},
    "buy-paid": {"task": "jobs.checkout.buy_paid", "schedule": 15.0, "options": {"expires": 15}},
    "process-top-ups-and-refunds": {"task": "billing.tasks.move_money", "schedule": 60.0, "options": {"expires": 60}},
    "fetch-events": {"task": "billing.tasks.fetch_events", "schedule": 3600.0},
    "check-credit-and-budgets": {"task": "billing.tasks.watch_money", "schedule": 60.0, "options": {"expires": 60}},
    "check-ledger": {"task": "billing.tasks.check_books", "schedule": 600.0, "options": {"expires": 600}},
    "write-invoices": {"task": "billing.tasks.write_invoices", "schedule": 3600.0},
    "forget-client-tokens": {"task": "console.accounts.openid.forget_expired_tokens", "schedule": 86400.0},
    "send-invitations": {"task": "console.accounts.invitations.send_due", "schedule": 60.0, "options": {"expires": 60}},
    "forget-abandoned-emails": {"task": "console.accounts.emails.forget_abandoned", "schedule": 86400.0},
    "clear-sessions": {"task": "console.accounts.sessions.clear_expired", "schedule": 3600.0},
    "deliver-webhooks": {"task": "console.notifications.tasks.deliver", "schedule": 10.0, "options": {"expires": 10}},
    "tidy-notifications": {"task": "console.notifications.tasks.tidy", "schedule": 86400.0},
    "mail-run-ends": {"task": "jobs.tasks.mail_run_ends", "schedule": 30.0, "options": {"expires": 30}},
    "announce-notebook-endings": {
        "task": "jobs.notebook_endings.announce_and_mail",
        "schedule": 30.0,
        "options": {"expires": 30},
    },
    "resume-imports": {"task": "storage.tasks.resume_imports", "schedule": 60.0, "options": {"expires": 60}},
    "sweep-storage": {"task": "storage.tasks.sweep", "schedule": 3600.0},
}

# --- Accounts --------------------------------------------------------------------------------------------------------
AUTH_USER_MODEL = "accounts.User"
# allauth's backend is a subclass of ModelBackend. With both in the list, each wrong password would be hashed twice.
AUTHENTICATION_BACKENDS = ["allauth.account.auth_backends.AuthenticationBackend"]
# The first hashes passwords; the second can still verify hashes that Django made by default.
PASSWORD_HASHERS = [
    "console.accounts.hashers.BoundedArgon2PasswordHasher",
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
ACCOUNT_FORMS = {"signup": "console.accounts.signup.AccountForm"}
ACCOUNT_SIGNUP_FIELDS = ["email*", "password1*", "password2*"]
ACCOUNT_USER_MODEL_USERNAME_FIELD = None
# With email, addresses are verified before the first log-in, so sign-up does not reveal who has an account.
ACCOUNT_EMAIL_VERIFICATION = env.choice(
    "EMAIL_VERIFICATION", "mandatory" if env.str("EMAIL_URL", "") else "optional", ("mandatory", "optional", "none")
)
ACCOUNT_EMAIL_SUBJECT_PREFIX = "[Trainyard] "
ACCOUNT_LOGOUT_ON_GET = False
ACCOUNT_SESSION_REMEMBER = True
# allauth applies `login_failed`, `second_factors` applies `second_factor`, and `accounts.saml` applies `saml_response`.
# The last limit is far higher, because a whole office may log in from one IP address in the same minute.
# `AccountAdapter` also counts failed log-ins by account and IP address.
ACCOUNT_RATE_LIMITS = {"login_failed": "10/m/ip", "second_factor": "5/15m/key", "saml_response": "120/m/ip"}
MFA_ADAPTER = "console.accounts.second_factors.SecondFactorAdapter"
MFA_SUPPORTED_TYPES = ["totp", "webauthn", "recovery_codes"]
MFA_PASSKEY_LOGIN_ENABLED = True
MFA_FORMS = {
    "authenticate": "console.accounts.second_factors.CodeForm",
    "reauthenticate": "console.accounts.second_factors.ConfirmationForm",
    "add_webauthn": "console.accounts.second_factors.PasskeyForm",
}
# Without email nobody can verify an address, but everyone must be able to use second factors.
MFA_ALLOW_UNVERIFIED_EMAIL = ACCOUNT_EMAIL_VERIFICATION != "mandatory"
STAFF_SECOND_FACTOR: bool = env.switch("STAFF_SECOND_FACTOR", False)
SIGNUP = env.choice("SIGNUP", "open", sign_in.SIGNUP_RULES)
SIGNUP_EMAIL_DOMAINS: list[str] = env.domains("SIGNUP_EMAIL_DOMAINS")
SIGNUP_CAPTCHA_FIELD = env.str("SIGNUP_CAPTCHA_FIELD", "")
"""The dotted path of a class or function that returns the form field of a captcha; empty: no captcha."""
API_REQUESTS_PER_MINUTE: int = env.whole_number("API_REQUESTS_PER_MINUTE", 6000, minimum=0)
# Single sign-on. A provider may report the e-mail address of an existing account. This alone does not open the account:
# its owner must first connect the two (SOCIALACCOUNT_EMAIL_AUTHENTICATION).
OIDC_PROVIDERS = sign_in.parse_oidc_providers(env.str("OIDC_PROVIDERS", ""))
SAML_PROVIDERS = sign_in.parse_saml_providers(env.str("SAML_PROVIDERS", ""), console_url=TRAINYARD_URL)
SOCIALACCOUNT_PROVIDERS = {
    "openid_connect": {"OAUTH_PKCE_ENABLED": True, "APPS": OIDC_PROVIDERS},
    "saml": {"APPS": SAML_PROVIDERS},
}
if SAML_PROVIDERS:
    INSTALLED_APPS.append("console.accounts.saml")
SOCIALACCOUNT_ADAPTER = "console.accounts.adapter.SingleSignOnAdapter"
SOCIALACCOUNT_FORMS = {"signup": "console.accounts.signup.SingleSignOnForm"}
SOCIALACCOUNT_EMAIL_AUTHENTICATION = False
SOCIALACCOUNT_EMAIL_VERIFICATION = ACCOUNT_EMAIL_VERIFICATION
SOCIALACCOUNT_REAUTHENTICATION_REQUIRED = True
# The console is an OpenID provider if this key is set. Administrators register its clients.
OPENID_PRIVATE_KEY = sign_in.parse_private_key(env.str("OPENID_PRIVATE_KEY", "", multiline=True))
IDP_OIDC_PRIVATE_KEY = OPENID_PRIVATE_KEY
IDP_OIDC_ADAPTER = "console.accounts.openid.ProviderAdapter"
IDP_OIDC_AUTH_METHODS = ["client_secret_basic", "client_secret_post"]
IDP_OIDC_REFRESH_TOKEN_EXPIRES_IN = SESSION_COOKIE_AGE
# A stolen refresh token is useless without the client's secret, and each client has one. If each use replaced the
# token, people would be logged out when a client sends two requests at once.
IDP_OIDC_ROTATE_REFRESH_TOKEN = False
# The version of the built-in terms of service (`templates/`). Change it with their text: customers then accept anew.
TERMS_VERSION = "2026-11-22"

# --- API -------------------------------------------------------------------------------------------------------------
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "console.accounts.authentication.TokenAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["console.accounts.access.HasCapability"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["console.core.parsers.JSONParser"],
    "DEFAULT_FILTER_BACKENDS": ["django_filters.rest_framework.DjangoFilterBackend"],
    "DEFAULT_PAGINATION_CLASS": "console.core.pagination.NewestFirst",
    "DEFAULT_SCHEMA_CLASS": "console.core.schema.Schema",
    "EXCEPTION_HANDLER": "console.api.exception_handler",
    "NUM_PROXIES": 0,  # `console.observability.addresses` has already put the client's address into REMOTE_ADDR
    "DEFAULT_THROTTLE_CLASSES": ["console.accounts.throttling.RequestsPerMinute"],
    "PAGE_SIZE": 50,
    "TEST_REQUEST_DEFAULT_FORMAT": "json",
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Trainyard API",
    "DESCRIPTION": "Buy distributed training and watch it run. Authenticate with `Authorization: Token <token>`.",
    "VERSION": "1",
    "SERVE_INCLUDE_SCHEMA": False,  # the schema does not describe its own route
    "SERVE_PERMISSIONS": ["rest_framework.permissions.AllowAny"],
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "COMPONENT_SPLIT_REQUEST": True,
    # The schema's names of enums for which drf-spectacular cannot derive a unique name from the field.
    "ENUM_NAME_OVERRIDES": {
        "InvoiceKindEnum": "billing.models.Invoice.Kinds",
        "EntryKindEnum": ["file", "folder", "link", "other"],
        "FileKindEnum": ["file", "folder"],
        "RoleEnum": "console.accounts.models.Membership.Roles",
        "ServiceAccountRoleEnum": ["member", "billing", "viewer"],
        "JobStateEnum": "jobs.models.Job.States",
        "QuoteRequestControllerEnum": ["gloo", "mpi"],
        "QuoteRequestLocalRankArgumentEnum": ["auto", "underscore", "dash", "none"],
        "QuoteRequestLrScalingEnum": ["none", "linear"],
        "QuoteRequestOnHangEnum": ["stop", "retry", "ignore"],
    },
}

# --- Money -----------------------------------------------------------------------------------------------------------
CURRENCY: str = env.str("CURRENCY", "USD")
STRIPE_SECRET_KEY: str = env.str("STRIPE_SECRET_KEY", "")
STRIPE_WEBHOOK_SECRETS: list[str] = env.names("STRIPE_WEBHOOK_SECRETS")
SANDBOX_PORT: int = env.whole_number(
    "SANDBOX_PORT", neighbouring_port(urlsplit(TRAINYARD_URL).port or 8000), maximum=MAX_PORT
)
SANDBOX_URL: str = f"http://127.0.0.1:{SANDBOX_PORT}"
PAYMENTS_SANDBOX: bool = not STRIPE_SECRET_KEY
QUOTE_TTL_SECONDS: int = env.whole_number("QUOTE_TTL_SECONDS", 1800)
TOP_UP_MINIMUM_MINOR: int = env.whole_number("TOP_UP_MINIMUM_MINOR", 500)
TOP_UP_MAXIMUM_MINOR: int = env.whole_number("TOP_UP_MAXIMUM_MINOR", 1_000_000)
CLOSURE_NOTICE_DAYS: int = env.whole_number("CLOSURE_NOTICE_DAYS", 14, minimum=0)
"""How many days after an owner's request an organization is closed."""

# --- Runs ------------------------------------------------------------------------------------------------------------
TRAINYARD_CLUSTERS = clusters.parse(env.str("TRAINYARD_CLUSTERS", ""), backend=env.str("RUNTIME_BACKEND", "local"))
REGISTRY_CHECKS: bool = env.switch("REGISTRY_CHECKS", True)
"""Whether customers' registries are asked if they have an image, when it is saved or quoted."""
WEBHOOK_PRIVATE_ADDRESSES: bool = env.switch("WEBHOOK_PRIVATE_ADDRESSES", False)
REGISTRY_PRIVATE_ADDRESSES: bool = env.switch("REGISTRY_PRIVATE_ADDRESSES", False)
"""Whether webhooks, and the checks of REGISTRY_CHECKS, may connect to private IP addresses."""
LOCAL_CPUS: float | None = env.number("LOCAL_CPUS", 0) or None
LOCAL_MEMORY_MIB: int | None = env.whole_number("LOCAL_MEMORY_MIB", 0) or None
LOCAL_DISK_MIB: int = env.whole_number("LOCAL_DISK_MIB", 51200)
LOCAL_WARM_SECONDS: float = env.number("LOCAL_WARM_SECONDS", 1800, can_be_zero=True)
"""How long interpreters for warm starts live after the last run of an image; 0: there are none."""
PACKAGE_INDEXES: list[str] = env.package_indexes("PACKAGE_INDEXES")
PACKAGE_FILE_HOSTS: list[str] = env.hosts("PACKAGE_FILE_HOSTS")
"""Further hosts from which the files of packages may come, besides those of PACKAGE_INDEXES."""
PACKAGES_MAX_MIB: int = env.whole_number("PACKAGES_MAX_MIB", 20480)
PACKAGE_INSTALLATIONS_PER_DAY: int = env.whole_number("PACKAGE_INSTALLATIONS_PER_DAY", 20, minimum=0)
TRAINYARD_RUN_NETWORK: str = env.choice("TRAINYARD_RUN_NETWORK", "private", ("private", "host"))
"""private: each run on this machine has its own network, with loopback only; host: runs share the machine's network."""
TOOLS_PER_ORGANIZATION: int = env.whole_number("TOOLS_PER_ORGANIZATION", 4, minimum=0)
TOOLS_TOTAL: int = env.whole_number("TOOLS_TOTAL", 16, minimum=0)
TOOLS_IDLE_SECONDS: int = env.whole_number("TOOLS_IDLE_SECONDS", 1800)
TOOLS_MEMORY_MIB: int = env.whole_number("TOOLS_MEMORY_MIB", 2048)
MAX_KEEP_DAYS: int = env.whole_number("MAX_KEEP_DAYS", 365, minimum=0)
"""How many days ahead a customer may move the deletion of a job's files."""
DATASET_IMPORT_HOSTS: list[str] = env.hosts("DATASET_IMPORT_HOSTS")
S3_IMPORT_ENDPOINTS: list[str] = env.web_addresses("S3_IMPORT_ENDPOINTS")
S3_IMPORT_PRIVATE_ADDRESSES: bool = env.switch("S3_IMPORT_PRIVATE_ADDRESSES", False)
UPLOAD_BUCKET: str = env.str("UPLOAD_BUCKET", "")
UPLOAD_BUCKET_ENDPOINT: str = env.web_address("UPLOAD_BUCKET_ENDPOINT") if UPLOAD_BUCKET else ""
UPLOAD_BUCKET_REGION: str = env.str("UPLOAD_BUCKET_REGION", "us-east-1")
UPLOAD_BUCKET_ACCESS_KEY_ID: str = env.str("UPLOAD_BUCKET_ACCESS_KEY_ID", "")
UPLOAD_BUCKET_SECRET_ACCESS_KEY: str = env.str("UPLOAD_BUCKET_SECRET_ACCESS_KEY", "")
MAX_UPLOAD_BYTES: int = env.whole_number("MAX_UPLOAD_BYTES", 20 * 1024**3)
TRAINYARD_GIT_HOSTS: list[str] = env.hosts(
    "TRAINYARD_GIT_HOSTS", ["github.com", "gitlab.com", "bitbucket.org", "codeberg.org"]
)
MAX_ARCHIVE_FILES: int = env.whole_number("MAX_ARCHIVE_FILES", 2_000_000)
MAX_FILE_BYTES: int = env.whole_number("MAX_FILE_BYTES", 1024**3)
"""The largest single file of a workspace; archives of datasets are limited by MAX_UPLOAD_BYTES."""
# The largest body of a request that is not an upload. `console.serving.application` reads such bodies before Django
# runs. The largest are files from the editor: 1 MiB of text, as JSON with escapes.
DATA_UPLOAD_MAX_MEMORY_SIZE = 5 * 1024**2

# --- Language, email, files -------------------------------------------------------------------------------------------
LANGUAGE_CODE = "en"
LANGUAGES = [("en", _("English")), ("zh-hans", _("Simplified Chinese"))]
LOCALE_PATHS = [BASE_DIR / "locale"]
TIME_ZONE = env.time_zone("TIME_ZONE", "UTC")
USE_TZ = True
FORMAT_MODULE_PATH = "console.formats"
EMAIL_TIMEOUT = 30  # in seconds, for each step: a mail server that hangs must not keep a worker
EMAIL_CONFIG = env.mail_server("EMAIL_URL")
vars().update(EMAIL_CONFIG)  # sets EMAIL_BACKEND, EMAIL_HOST and the like
DEFAULT_FROM_EMAIL = env.str("DEFAULT_FROM_EMAIL", "Trainyard <noreply@localhost>")
STATIC_URL = "/static/"
STATIC_ROOT: Path = Path(env.str("TRAINYARD_STATIC_ROOT", str(VAR_DIR / "static")))
STATICFILES_DIRS = [BASE_DIR / "static"]
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "console.serving.static.StaticStorage"},
}
WHITENOISE_USE_FINDERS = DEBUG
WHITENOISE_KEEP_ONLY_HASHED_FILES = True  # compressing the others too would double the time of the first start
WHITENOISE_SKIP_COMPRESS_EXTENSIONS = [*Compressor.SKIP_COMPRESS_EXTENSIONS, "map"]  # only developers load source maps
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [SELF],
        "script-src": [SELF],
        "style-src": [SELF],
        "img-src": [SELF, "data:"],
        "font-src": [SELF],
        # Browsers send large uploads directly to the bucket.
        "connect-src": [SELF, UPLOAD_BUCKET_ENDPOINT] if UPLOAD_BUCKET else [SELF],
        "object-src": [NONE],
        "base-uri": [SELF],
        "frame-ancestors": [NONE],
        # Forms that start a payment or a single sign-on redirect to the page of another host.
        "form-action": [
            SELF,
            SANDBOX_URL if PAYMENTS_SANDBOX else "https://checkout.stripe.com",
            *sign_in.origins([*OIDC_PROVIDERS, *SAML_PROVIDERS]),
        ],
    },
}
# On the admin's pages, django-unfold writes a <style>, and its Alpine.js evaluates expressions in attributes.
ADMIN_POLICY_UPDATE = {"script-src": [UNSAFE_EVAL], "style-src": [UNSAFE_INLINE]}
UNFOLD = admin_theme.UNFOLD

# --- Serving ---------------------------------------------------------------------------------------------------------
WEB_PROCESSES: int = env.whole_number("WEB_PROCESSES", 2)
WEB_THREADS: int = env.whole_number("WEB_THREADS", 8)
UPLOAD_THREADS: int = env.whole_number("UPLOAD_THREADS", 8)
MAX_CONNECTIONS: int = env.whole_number("MAX_CONNECTIONS", 4000)
MAX_CONNECTIONS_PER_ADDRESS: int = env.whole_number("MAX_CONNECTIONS_PER_ADDRESS", 256)
MAX_STREAMS_PER_ORGANIZATION: int = env.whole_number("MAX_STREAMS_PER_ORGANIZATION", 100)
# A request's headers must arrive within HEADER_SECONDS. In each period of BODY_SECONDS, its body must arrive at
# BODY_BYTES_PER_SECOND or faster; every mobile network does. `console.serving.protocol` enforces this.
HEADER_SECONDS = 10.0
BODY_SECONDS = 10.0
BODY_BYTES_PER_SECOND = 500

# --- Operations ------------------------------------------------------------------------------------------------------
LOGGING = logs.configuration(
    log_format=env.choice("LOG_FORMAT", "text", logs.FORMATS), level=env.choice("LOG_LEVEL", "INFO", logs.LEVELS)
)
METRICS_TOKEN: str = env.str("METRICS_TOKEN", "")
OTEL_EXPORTER_OTLP_ENDPOINT: str = env.endpoint("OTEL_EXPORTER_OTLP_ENDPOINT")
