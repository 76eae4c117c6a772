"""The settings of the servers in `test_serving`: short deadlines, and the views of `serving_urls`."""

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES, env

ROOT_URLCONF = "tests.console.serving_urls"
DATABASES["default"] |= {
    "HOST": env.str("TEST_DATABASE_FOLDER", "/no/database"),
    "NAME": "postgres",
    "CONN_MAX_AGE": 600,  # as in production; tests otherwise keep no connection
}
HEADER_SECONDS = BODY_SECONDS = env.float("TEST_DEADLINE_SECONDS", 2.0)
MAX_CONNECTIONS_PER_ADDRESS = env.int("TEST_CONNECTIONS", 256)
MAX_STREAMS_PER_ORGANIZATION = 3
WEB_PROCESSES = env.int("TEST_PROCESSES", 1)
WEB_THREADS = UPLOAD_THREADS = 4
