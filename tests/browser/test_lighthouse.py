"""Lighthouse gives *New training* on a phone all points for accessibility and best practices.

Points for performance depend on the load: `make bench NAME=lighthouse` measures them.
"""

import pytest

from tests.browser import lighthouse
from tests.browser.conftest import LIVE_SERVER_MARKS, session_cookie

pytestmark = [*LIVE_SERVER_MARKS, pytest.mark.skipif(not lighthouse.is_installed(), reason=lighthouse.NOT_INSTALLED)]
CATEGORIES = ("accessibility", "best-practices")


def test_lighthouse_gives_all_points(transactional_db, playwright, console, customer):
    session = session_cookie(console, customer.membership.user)
    audit = lighthouse.audit(
        playwright, f"{console}/training/new/", categories=CATEGORIES, cookies=[session], is_phone=True
    )
    faults = [fault for category in CATEGORIES for fault in audit.faults(category)]
    assert audit.scores == dict.fromkeys(CATEGORIES, 100), "\n".join(faults)
