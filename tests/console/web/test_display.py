"""How values, states and recorded actions are written, and what templates may load."""

import re
from datetime import timedelta
from decimal import Decimal

from django.conf import settings
from django.utils import timezone
from django.utils.translation import override

from console.accounts.models import AuditEvent
from console.web import activity
from console.web.audit import AREAS
from console.web.navigation import SECTIONS
from console.web.templatetags import trainyard

TEMPLATES = sorted((settings.BASE_DIR / "templates").rglob("*.html"))
ICON = re.compile(r'\{% icon "([a-z0-9-]+)"|\bicon="([a-z0-9-]+)"')
OTHER_HOST = re.compile(r"""(?:src|href|action)=["'](?:https?:)?//""")
ACTION = re.compile(r'(?:action=|_end\([a-z]+, [a-z]+, |action: str = )"([a-z_]+\.[a-z_]+)"')
"""The ways in which the sources name an action of the audit log."""


def test_a_value_is_written_with_its_unit_in_the_readers_language():
    with override("en"):
        for text, filter_, arguments in (
            ("$12.34", trainyard.money, (1234, "USD")),
            ("¥1,234", trainyard.money, (1234, "JPY")),
            ("KWD1.234", trainyard.money, (1234, "KWD")),
            ("–", trainyard.money, (None, "USD")),
            ("–", trainyard.money, ("", "USD")),
            ("+$5.00", trainyard.signed_money, (500, "USD")),
            ("−$5.00", trainyard.signed_money, (-500, "USD")),
            ("$0.8125", trainyard.rate, (Decimal("81.25"), "USD")),
            ("0 s", trainyard.duration, (0,)),
            ("1 min", trainyard.duration, (59.6,)),
            ("12 min 5 s", trainyard.duration, (725,)),
            ("2 h 1 min", trainyard.duration, (7260,)),
            ("2 d 2 h", trainyard.duration, (180_000,)),
            ("–", trainyard.duration, (None,)),
            ("0 B", trainyard.bytes_, (0,)),
            ("1.5 KiB", trainyard.bytes_, (1536,)),
            ("300 GiB", trainyard.bytes_, (300 * 1024**3,)),
        ):
            assert filter_(*arguments) == text
    with override("zh-hans"):
        assert trainyard.money(1234, "CNY") == "¥12.34"
        assert "Running" not in trainyard.state_badge("running")
        assert trainyard.duration(725) == "12 分钟 5 秒"
        assert ">5\N{NO-BREAK SPACE}分钟前<" in trainyard.ago(timezone.now() - timedelta(minutes=5))


def test_each_recorded_action_has_a_sentence():
    packages = ("console", "billing", "storage", "jobs")
    sources = (path for package in packages for path in (settings.BASE_DIR / package).rglob("*.py"))
    recorded = {action for path in sources for action in ACTION.findall(path.read_text())}
    assert len(recorded) > 20, "ACTION no longer matches the sources"
    assert recorded <= set(activity.DESCRIPTIONS)
    for action in activity.DESCRIPTIONS:
        event = AuditEvent(action=action, target="job:7", data={"version": 2, "from": "member", "to": "owner"})
        assert "%(" not in activity.describe(event)
    changed = {"action": "member.role_changed", "target": "a@example.com", "data": {"from": "member", "to": "viewer"}}
    budget = {"action": "budget.changed", "data": {"member": "a@example.com", "amount_minor": 100}}
    with override("en"):
        assert [activity.describe(AuditEvent(**event)) for event in (changed, budget)] == [
            "Changed the role of a@example.com to Viewer", "Changed the budget of a@example.com",
        ]  # fmt: skip
        refund = AuditEvent(action="refund.started", data={"amount_minor": 700, "currency": "USD"})
        assert activity.describe(refund) == "Started a refund: $7.00"
        assert activity.describe(AuditEvent(action="test.done", target="x")) == "test.done x"


def test_the_audit_logs_filter_has_each_action_of_an_organization():
    areas = {action.partition(".")[0] for action in activity.DESCRIPTIONS}
    of_no_organization = {"approval", "cluster", "voucher"}  # only administrators see these
    assert areas - of_no_organization == {*AREAS, "factors"}  # the area `account` has `factors.reset`


def test_the_vendored_icons_are_those_that_are_used():
    used = {name for each in TEMPLATES for pair in ICON.findall(each.read_text()) for name in pair if name}
    used |= {entry.icon for section in SECTIONS for entry in section.entries}
    assert used == {path.stem for path in (settings.BASE_DIR / "static/vendor/tabler-icons").glob("*.svg")}


def test_a_template_begins_with_its_purpose_and_loads_nothing_from_other_hosts():
    for template in TEMPLATES:
        text = template.read_text()
        assert text.startswith(("{#", "{% comment %}")), template
        assert not OTHER_HOST.search(text), template
