"""The settings of `test_live`'s processes."""

import os
from pathlib import Path

from tests.settings import *  # noqa: F403

ROOT_URLCONF = "tests.console.live_urls"
TRAINYARD_LIVE_SOCKET = Path(os.environ["TEST_LIVE_SOCKET"])
