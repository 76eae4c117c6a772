"""The audit log of log-ins, and its page."""

from datetime import timedelta

import pytest
from allauth.account.models import EmailAddress
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from console.accounts import audit, services
from console.accounts.models import AuditEvent
from console.web.audit import PAGE_SIZE
from tests.console.accounts.conftest import forwarded_for
from tests.factories.accounts import PASSWORD, MembershipFactory

pytestmark = pytest.mark.django_db
PAGE = reverse("audit_log")


def actions(organization):
    return list(AuditEvent.objects.filter(organization=organization).order_by("id").values_list("action", flat=True))


@pytest.mark.usefixtures("proxied")
def test_each_organization_of_a_person_learns_of_a_log_in_and_its_address(owner, stranger):
    second, client = MembershipFactory(user=owner.user), Client()
    # The client wrote the first address, the proxy added the second.
    through_proxy = forwarded_for("1.2.3.4, 192.0.2.7")
    client.post(reverse("account_login"), {"login": owner.user.email, "password": PASSWORD}, **through_proxy)
    form = {"oldpassword": PASSWORD, "password1": "plain horse 9", "password2": "plain horse 9"}
    client.post(reverse("account_change_password"), form, **through_proxy)
    for organization in (owner.organization, second.organization):
        assert actions(organization) == ["account.logged_in", "account.password_changed"]
    assert actions(stranger.organization) == []
    assert AuditEvent.objects.filter(address="192.0.2.7").count() == 4  # two events in two organizations
    services.rename_organization(organization=owner.organization, name="Newer name", actor=owner.user)
    assert AuditEvent.objects.latest("id").address is None  # outside a request


def test_a_failed_log_in_is_looked_up_outside_the_request(owner, monkeypatch):
    # Else the time of the answer would reveal whether the account exists.
    sent = []
    monkeypatch.setattr(audit, "send", lambda task, *arguments: sent.append((task, arguments)))
    for email in (owner.user.email, "nobody@example.com"):
        Client(REMOTE_ADDR="192.0.2.8").post(reverse("account_login"), {"login": email, "password": "wrong"})
    assert [arguments for _task, arguments in sent] == [
        (owner.user.email, "192.0.2.8"),
        ("nobody@example.com", "192.0.2.8"),
    ]
    for task, arguments in sent:
        task(*arguments)
    EmailAddress.objects.create(user=owner.user, email="second@example.com", verified=True)
    audit.record_failed_log_in("Second@example.com", "192.0.2.8")
    assert (
        list(AuditEvent.objects.values_list("action", "actor", "address"))
        == [("account.log_in_failed", owner.user.pk, "192.0.2.8")] * 2
    )


def test_owners_read_only_their_own_organizations_log_and_log_ins_only_there(owner, stranger, client):
    services.record_audit_event(
        organization=stranger.organization, actor=stranger.user, action="token.created", target="theirs"
    )
    services.record_audit_event(
        organization=owner.organization, actor=owner.user, action="token.created", target="ours"
    )
    client.force_login(owner.user)
    page = client.get(PAGE).text
    assert "ours" in page
    assert "theirs" not in page
    assert "theirs" not in client.get(PAGE, {"member": stranger.user.pk}).text
    audit.record_for_person(user=owner.user, action="logged_in")
    assert "Logged in" in client.get(PAGE).text
    # The organization's page shows members' recent events, but no log-ins.
    assert "Logged in" not in client.get(reverse("organization")).text


def test_the_page_filters_and_continues_without_counting(owner, client, django_assert_max_num_queries):
    other = MembershipFactory(organization=owner.organization)
    for number in range(PAGE_SIZE + 5):
        services.record_audit_event(
            organization=owner.organization, actor=owner.user, action="token.created", target=f"t{number:03}."
        )
    services.record_audit_event(
        organization=owner.organization, actor=other.user, action="member.removed", target="bob@example.com"
    )
    # What an administrator did to a member's log-in is in the area of log-ins.
    services.record_audit_event(
        organization=owner.organization, actor=None, action="factors.reset", target="eve@example.com"
    )
    old = AuditEvent.objects.get(target="t000.")
    AuditEvent.objects.filter(pk=old.pk).update(created_at=timezone.now() - timedelta(days=9), address="2001:db8::1")
    client.force_login(owner.user)
    get = lambda **query: client.get(PAGE, query)
    with django_assert_max_num_queries(12) as captured:  # however many events there are
        first = get()
    assert not any("COUNT(" in query["sql"] for query in captured.captured_queries)
    assert "bob@example.com" in first.text
    assert "t000." not in first.text
    assert "t000." in get(before=first.context["older"]).text
    today = timezone.localdate()
    for query, has_old, count in (
        ({"area": "member"}, False, 1),
        ({"area": "account"}, False, 1),
        ({"member": other.user.pk}, False, 1),
        ({"address": "2001:db8::1"}, True, 1),
        ({"until": today - timedelta(days=9)}, True, 1),
        ({"since": today, "area": "token"}, False, PAGE_SIZE),
        ({"since": "never", "area": "member"}, False, 1),  # an invalid filter does not turn off the others
    ):
        events = get(**query).context["events"]
        assert (old in events, len(events)) == (has_old, count), query
    for query in ({"address": "x"}, {"since": "y"}, {"until": "9999-12-31"}, {"before": "-1"}, {"member": "0 or 1"}):
        assert get(**query).status_code == 200
    assert "Enter a valid date." in get(since="never").text
