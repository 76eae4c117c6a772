"""Times are in the reader's time zone, with its name; accounting periods are in the installation's."""

from datetime import UTC, datetime

import pytest
from django.core import mail
from django.urls import reverse
from django.utils import timezone, translation
from django.utils.formats import localize

from billing import costs
from console.accounts import emails, invitations, services, zones
from console.accounts.models import AuditEvent, Invitation
from console.accounts.roles import Role
from console.core.errors import InvalidInput
from console.web.templatetags import trainyard
from jobs.messages import waiting_sentence

MOMENT = datetime(2026, 11, 1, 3, 30, tzinfo=UTC)
"""The first of a month in UTC, and still the last of the month before in New York."""
NEW_YORK, BERLIN = "America/New_York", "Europe/Berlin"


@pytest.mark.parametrize(
    ("at", "zone", "language", "text"),
    [
        (MOMENT, "UTC", "en", "Nov 1, 2026, 3:30:00\u202fAM UTC"),
        (MOMENT, NEW_YORK, "en", "Oct 31, 2026, 11:30:00\u202fPM EDT"),
        (MOMENT, "America/Sao_Paulo", "en", "Nov 1, 2026, 12:30:00\u202fAM UTC-03"),
        (MOMENT, "Asia/Shanghai", "zh-hans", "2026年11月1日 11:30:00 CST"),
        # the hour that the end of summer time repeats
        (datetime(2026, 10, 25, 0, 30, tzinfo=UTC), BERLIN, "en", "Oct 25, 2026, 2:30:00\u202fAM CEST"),
        (datetime(2026, 10, 25, 1, 30, tzinfo=UTC), BERLIN, "en", "Oct 25, 2026, 2:30:00\u202fAM CET"),
    ],
)
def test_a_time_is_written_in_the_readers_zone_with_its_name(at, zone, language, text):
    with timezone.override(zone), translation.override(language):
        assert trainyard.moment_text(at) == text
        assert trainyard.moment(at).startswith(f'<time datetime="{at.isoformat()}" title="{zone}">{text}')


def test_months_are_the_installations_in_every_readers_zone():
    with timezone.override(NEW_YORK):
        assert trainyard.month(MOMENT) == "November 2026"
        assert trainyard.day(MOMENT) == "Nov 1, 2026"
        assert costs.month_of(MOMENT).start == datetime(2026, 11, 1, tzinfo=UTC)
        assert costs.parse_month("2026-11").end == datetime(2026, 12, 1, tzinfo=UTC)


@pytest.mark.django_db
def test_the_chosen_zone_wins_over_the_browsers(client, owner):
    AuditEvent.objects.create(organization=owner.organization, action="test.done")
    AuditEvent.objects.update(created_at=MOMENT)
    client.force_login(owner.user)

    def shown():
        return client.get(reverse("organization")).content.decode()

    assert "3:30:00\u202fAM UTC" in shown()
    client.cookies[zones.COOKIE] = "Europe%2FBerlin"
    assert "4:30:00\u202fAM CET" in shown()
    client.post(reverse("time_zone"), {"time_zone": NEW_YORK})
    assert "11:30:00\u202fPM EDT" in shown()
    assert f"Automatic: {BERLIN}" in client.get(reverse("time_zone")).content.decode()
    client.post(reverse("time_zone"), {"time_zone": ""})
    client.cookies[zones.COOKIE] = "../../etc/passwd"
    assert "4:30:00\u202fAM CET" in shown()  # the browser's last valid zone
    assert timezone.get_current_timezone_name() == "UTC"  # a request leaves no zone to the next one of its thread
    with pytest.raises(InvalidInput):
        services.choose_time_zone(user=owner.user, name="../../etc/passwd")


@pytest.mark.django_db
def test_email_is_in_each_readers_zone(owner):
    row = invitations.invite(organization=owner.organization, email="a@example.com", role=Role.VIEWER, actor=owner.user)
    readers = [
        # The chosen zone, then the browser's.
        emails.Guest("a@example.com", "en", BERLIN, NEW_YORK),
        emails.Guest("b@example.com", "en", "", NEW_YORK),
        emails.Guest("c@example.com", "en"),
        emails.Guest("d@example.com", ""),  # in the default language, which is English too
    ]
    rows = Invitation.objects.filter(pk=row.pk)
    emails.deliver(rows, lambda: ("subject", trainyard.moment_text(MOMENT)), readers)
    assert {tuple(each.to): each.body.split()[-1] for each in mail.outbox} == {
        ("a@example.com",): "CET",
        ("b@example.com",): "EDT",
        ("c@example.com",): "UTC",
        ("d@example.com",): "UTC",
    }


def test_times_in_the_admin_and_of_the_next_attempt_name_their_zone():
    data = {"reason": "hung", "at": MOMENT.isoformat()}
    with timezone.override(BERLIN):
        assert localize(timezone.localtime(MOMENT)).endswith("CET")
        sentence = waiting_sentence("retry", data, nodes=1, spec="Nano", ahead=0)
    assert "The next attempt starts after 04:30:00 CET" in sentence
