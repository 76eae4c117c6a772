"""A second factor is required, by an organization of its members or by the installation of its administrators."""

import json
import re

import pytest
from allauth.mfa.models import Authenticator
from django.urls import reverse

from console.accounts import second_factors, service_accounts, services
from console.accounts.access import is_still_allowed
from console.accounts.models import AuditEvent, Organization
from console.accounts.roles import Capability, Role
from tests.console.routes import routes_of
from tests.console.test_request_matrix import ROUTES
from tests.factories.accounts import MembershipFactory, UserFactory, logged_in

pytestmark = pytest.mark.django_db
SECURITY = "/security/"
PERSONAL = {
    "organization_new", "organization_switch", "time_zone", "security", "security_end_sessions", "security_end_session",
    "security_end_client_access", "security_export", "security_delete",
}  # fmt: skip
"""URL names of pages about the person, not about an organization."""
OPEN = PERSONAL | {
    "docs", "docs_page", "brand_style", "brand_logo", "legal_text", "invitation", "invitation_accept",
    "invitation_decline",
    "notebook_admit",  # for the web server alone: tells it whether a member's session may use a notebook
    "shell_admit",  # likewise for a shell
}  # fmt: skip
"""URL names that stay open to members without a second factor."""
ARGUMENTS = {"uuid": "00000000-0000-4000-8000-000000000000", "int": "1", "file": "a.py"}
"""An argument for each converter of a route."""
PATCH = {"path": "/api/v1/organization/", "content_type": "application/json"}
"""The options of a request that changes the organization, except its data."""


def protect(user):
    """Store a passkey of the user. The rule checks no more than that its row exists."""
    Authenticator.objects.create(user=user, type=Authenticator.Type.WEBAUTHN, data={"name": "Key"})


def path_of(route):
    """Return a path that matches a route."""
    return re.sub(r"<(?:(\w+):)?\w+>", lambda match: ARGUMENTS.get(match[1], "x"), route)


@pytest.fixture
def required(owner):
    """An organization that requires a second factor; its owner has one."""
    protect(owner.user)
    return services.set_second_factor_required(organization=owner.organization, is_required=True, actor=owner.user)


def test_a_member_without_a_second_factor_is_redirected_from_every_page_to_set_it_up(required, member):
    client = logged_in(member.user)
    for route, pattern in routes_of("console.web.urls"):
        if pattern.name in OPEN:
            continue
        path = f"/{path_of(route)}"
        answers = [client.get(path), client.post(path)]
        assert {answer.status_code for answer in answers} <= {302, 405}, pattern.name
        assert {answer.url for answer in answers if answer.status_code == 302} == {SECURITY}, pattern.name
    assert client.get("/", headers={"HX-Request": "true"})["HX-Redirect"] == SECURITY
    page = client.get(SECURITY).text
    assert f"{required.name} requires a second factor." in page
    assert reverse("job_list") not in page
    protect(member.user)
    assert client.get("/").status_code == 200
    assert "requires a second factor" not in client.get(SECURITY).text


@pytest.mark.usefixtures("required")
def test_a_member_without_a_second_factor_reaches_no_api_route_by_token_or_session(member, api):
    by_token, by_session = api(member), logged_in(member.user)
    # ROUTES has every route of the API with its methods; public routes have none.
    asked = [(by_token, method, route) for route, methods in ROUTES.items() for method in methods]
    for client, method, route in (*asked, (by_session, "GET", "whoami/"), (by_session, "GET", "jobs/")):
        answer = client.generic(method, f"/api/v1/{path_of(route)}")
        assert (answer.status_code, answer.json()["code"]) == (403, "second_factor_required"), (method, route)
    protect(member.user)
    assert {client.get("/api/v1/whoami/").status_code for client in (by_token, by_session)} == {200}


@pytest.mark.usefixtures("required")
def test_other_organizations_and_service_accounts_are_not_affected(owner, member, api):
    other = MembershipFactory(user=member.user)
    client = logged_in(member.user)
    assert client.get("/").url == SECURITY
    # The switch must also be in the page itself, because narrow windows show no top bar.
    in_the_page = client.get(SECURITY).text.partition("<main")[2]
    assert reverse("organization_switch") in in_the_page
    client.post(reverse("organization_switch"), {"organization": other.organization_id})
    assert client.get("/").status_code == 200
    robot = service_accounts.create(actor=owner, name="robot", role=Role.VIEWER)
    assert api(robot.membership).get("/api/v1/jobs/").status_code == 200


def test_a_stream_ends_when_the_rule_begins(owner, member, rf):
    request = rf.get("/")
    # `is_still_allowed` takes the API framework's request, which wraps Django's. Here one object stands for both.
    request._request, request.auth = request, None
    request.session, request.user = logged_in(member.user).session, member.user
    request.membership = member
    assert is_still_allowed(request, Capability.VIEW)  # a stream asks this from time to time
    protect(owner.user)
    services.set_second_factor_required(organization=owner.organization, is_required=True, actor=owner.user)
    assert not is_still_allowed(request, Capability.VIEW)


def test_an_owner_with_a_second_factor_sets_the_rule_on_the_page_and_in_the_api(owner, member):
    client, members_client = logged_in(owner.user), logged_in(member.user)
    answer = client.patch(data=json.dumps({"requires_second_factor": True}), **PATCH)
    assert "for your own account first" in answer.json()["fields"]["requires_second_factor"]
    page = client.post(reverse("organization_second_factor"), {"required": "1"}, follow=True)
    assert "for your own account first" in page.text
    protect(owner.user)
    assert not Organization.objects.get().requires_second_factor
    page = client.post(reverse("organization_second_factor"), {"required": "1"}, follow=True).text
    assert "All members now need a second factor." in page
    assert page.count("no second factor") == 1  # beside the member; the owner has one
    assert client.patch(data=json.dumps({"requires_second_factor": True}), **PATCH).json()["requires_second_factor"]
    client.post(reverse("organization_second_factor"), {"required": "0"})
    assert members_client.get("/").status_code == 200
    actions = AuditEvent.objects.filter(action__startswith="organization.second").order_by("id")
    # A change to the same value writes no event.
    assert [each.action.rpartition("_")[2] for each in actions] == ["required", "optional"]


def test_administrators_need_a_second_factor_if_the_installation_requires_it(settings):
    admin = UserFactory(is_staff=True, is_superuser=True)
    client = logged_in(admin)
    paths = [reverse("admin:index"), reverse("admin:accounts_user_changelist"), reverse("admin:accounts_user_add")]
    for is_required in (False, True):
        settings.STAFF_SECOND_FACTOR = is_required
        answers = [client.get(path) for path in paths]
        expected = (302, SECURITY) if is_required else (200, None)
        assert {(answer.status_code, answer.get("Location")) for answer in answers} == {expected}
        assert ("Administrators of this console need" in client.get(SECURITY).text) == is_required
        assert second_factors.may_administer(admin) != is_required
    protect(admin)
    assert client.get(paths[0]).status_code == 200
    assert second_factors.may_administer(admin)
