"""Lighthouse gives the log-in, the overview and *New training* all points for accessibility and best practices.

The log-in and *New training* are audited as a phone shows them, too.

Points for performance depend on the load: `make bench NAME=lighthouse` measures them. Here they are printed.
"""

import pytest

from tests.browser import lighthouse
from tests.browser.conftest import session_cookie
from tests.browser.furnished import furnish
from tests.factories.jobs import Customer

pytestmark = [
    pytest.mark.browser,
    pytest.mark.late("it awaits a console and a browser, with limits of seconds"),
    pytest.mark.slow,
    pytest.mark.skipif(not lighthouse.is_installed(), reason=lighthouse.NOT_INSTALLED),
]


def test_lighthouse_gives_all_points(transactional_db, console, backend, provider):
    customer = Customer(backend)
    furnish(customer, provider)
    session = session_cookie(console, customer.membership.user)
    faults = []
    for path, cookies, is_phone in (
        ("accounts/login/", [], False),
        ("", [session], False),
        ("training/new/", [session], False),
        ("accounts/login/", [], True),
        ("training/new/", [session], True),
    ):
        audit = lighthouse.audit(f"{console}/{path}", cookies=cookies, is_phone=is_phone)
        print(f"/{path}{' phone' * is_phone}: {audit.scores}")  # noqa: T201
        for category in ("accessibility", "best-practices"):
            if audit.scores[category] < 100:
                faults += [f"/{path}{' phone' * is_phone}: {fault}" for fault in audit.faults(category)]
    assert not faults, "\n".join(faults)
