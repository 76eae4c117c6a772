"""Lighthouse gives the log-in, and *New training* on a phone, all points for accessibility and best practices.

Points for performance depend on the load: `make bench NAME=lighthouse` measures them.
"""

import pytest

from tests.browser import lighthouse
from tests.browser.conftest import LIVE_SERVER_MARKS, session_cookie
from tests.browser.furnished import furnish
from tests.factories.jobs import Customer

pytestmark = [*LIVE_SERVER_MARKS, pytest.mark.skipif(not lighthouse.is_installed(), reason=lighthouse.NOT_INSTALLED)]
CATEGORIES = ("accessibility", "best-practices")


def test_lighthouse_gives_all_points(transactional_db, playwright, console, backend, provider):
    customer = Customer(backend)
    furnish(customer, provider)
    session = session_cookie(console, customer.membership.user)
    for path, cookies, is_phone in (("accounts/login/", [], False), ("training/new/", [session], True)):
        audit = lighthouse.audit(
            playwright, f"{console}/{path}", categories=CATEGORIES, cookies=cookies, is_phone=is_phone
        )
        faults = [fault for category in CATEGORIES for fault in audit.faults(category)]
        assert audit.scores == dict.fromkeys(CATEGORIES, 100), "\n".join(faults)
