"""The settings of a server that `test_tus_clients` starts on its own database."""

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES, env

DATABASES["default"] |= {"NAME": env.str("TEST_DATABASE"), "CONN_MAX_AGE": 600}
