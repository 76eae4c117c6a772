"""The page on which administrators read a customer's job: who may open it, what it lacks, and its audit entries."""

import json
import re

import pytest
from django.contrib.auth.models import Permission
from django.urls import reverse

from console.accounts.models import AuditEvent
from console.accounts.roles import Role
from console.web import activity, job_page, operator_page
from jobs.models import Job
from runtime.specs import Outcome
from tests.factories.accounts import MembershipFactory, UserFactory, logged_in

LOGIN, SECURITY = reverse("account_login"), reverse("security")
ACTION = re.compile(r"<(form|button|input|select|textarea)\b|\b(hx|data-bs)-|method=|target=|download")
"""HTML with which a page could change or send something, or offer a download."""
CHART_CONTROLS = re.compile(r'<form class="curves-controls.*?</form>', re.DOTALL)
"""Controls that change how the browser draws charts. They send nothing."""
TAB_LIST = re.compile(r'<select class="[^"]*tabs-list".*?</select>', re.DOTALL)
"""The list that replaces the tabs on phones. It opens the page that is chosen."""
TRACEBACK = """Traceback (most recent call last):
  File "/workspace/train.py", line 1, in <module>
    print('hello')
KeyError: 7
"""


def tab_urls(job):
    return [reverse("operator_job", args=[job.pk, tab]) for tab in operator_page.TAB_TITLES]


def page_urls(job):
    return [*tab_urls(job), reverse("operator_job", args=[job.pk])]


def all_urls(job):
    return [*page_urls(job), reverse("operator_job_curves", args=[job.pk])]


def operator(*codenames, **options):
    """Return a new user of the staff with these permissions."""
    user = UserFactory(is_staff=True, **options)
    user.user_permissions.add(*Permission.objects.filter(codename__in=codenames))
    return user


def main_of(answer):
    """Return the HTML of the page without its frame."""
    assert answer.status_code == 200
    return answer.content.decode().partition("<main")[2].partition("</main>")[0]


def test_only_administrators_with_the_permission_open_the_page(client, customer, completed_job, settings):
    # An owner who is not of the staff.
    with_permission = MembershipFactory(role=Role.OWNER, organization=customer.organization).user
    with_permission.user_permissions.add(Permission.objects.get(codename="view_job"))
    opened = AuditEvent.objects.filter(action="job.page_opened_by_operator")
    for who, user, status in (
        ("staff without the permission", operator("view_order", "change_job"), 404),
        ("deactivated", operator("view_job", is_active=False), 302),
        ("owner", customer.membership.user, 404),
        ("owner with the permission", with_permission, 404),
        ("stranger", MembershipFactory(role=Role.OWNER).user, 404),
    ):
        page = logged_in(user)
        assert {page.get(url).status_code for url in all_urls(completed_job)} == {status}, who
    assert all(client.get(url).url.startswith(LOGIN) for url in all_urls(completed_job))
    settings.STAFF_SECOND_FACTOR = True
    page = logged_in(operator("view_job"))
    assert {page.get(url).url for url in all_urls(completed_job)} == {SECURITY}
    settings.STAFF_SECOND_FACTOR = False
    assert not opened.exists()
    for user in (operator("view_job"), operator(is_superuser=True)):
        page = logged_in(user)
        assert {page.get(url).status_code for url in all_urls(completed_job)} == {200}
    assert opened.count() == 2 * len(all_urls(completed_job))


def test_an_opened_tab_is_in_the_customers_audit_log_and_there_are_no_other_tabs_or_methods(customer, completed_job):
    user = operator("view_job")
    MembershipFactory(user=user, role=Role.OWNER)  # their own organization must not get the entry
    client = logged_in(user)
    page = main_of(client.get(reverse("operator_job", args=[completed_job.pk, "nodes"])))
    assert customer.organization.name in page
    event = AuditEvent.objects.get(action="job.page_opened_by_operator")
    assert (event.organization, event.actor, event.target) == (customer.organization, user, f"job:{completed_job.pk}")
    assert event.data == {"tab": "nodes"}
    assert activity.describe(event) == f"An administrator opened the page of job #{completed_job.pk}"
    button = reverse("admin:jobs_job_customers_page", args=[completed_job.pk])
    assert button in client.get(reverse("admin:jobs_job_change", args=[completed_job.pk])).content.decode()
    assert client.get(button).url == reverse("operator_job", args=[completed_job.pk])
    assert {client.post(url).status_code for url in all_urls(completed_job)} == {405}
    for arguments in (*([completed_job.pk, tab] for tab in ("files", "telemetry", "shell")), [completed_job.pk + 1]):
        assert client.get(reverse("operator_job", args=arguments)).status_code == 404, arguments
    assert AuditEvent.objects.filter(action="job.page_opened_by_operator").count() == 1


@pytest.fixture
def jobs(customer):
    """Jobs in several states. On the customer's page they offer every action, such as to rerun or to compare."""
    started, failing = customer.started(), customer.started()
    customer.backend.write(failing.run_name, TRACEBACK, rank=0)
    failed = customer.end(failing, Outcome.CODE_FAILED, rank=0)
    hung = customer.end(customer.started(), Outcome.HUNG)
    rerun = customer.end(customer.started(), Outcome.COMPLETED)
    Job.objects.filter(pk=rerun.pk).update(rerun_of=failed, from_checkpoint=failed, tags=["x"], environment={"A": "b"})
    return [customer.job(), started.job, failed, hung, rerun, customer.ended_with_log()]


def test_the_page_offers_nothing_but_its_tabs_and_links_to_the_admin(customer, jobs):
    user = operator("view_job", is_superuser=True)
    # No action appears, although the administrator owns an organization, and the customer's organization too.
    MembershipFactory(user=user, role=Role.OWNER)
    MembershipFactory(user=user, role=Role.OWNER, organization=customer.organization)
    client = logged_in(user)
    for job in jobs:
        known = {
            *all_urls(job),
            reverse("admin:jobs_job_change", args=[job.pk]),
            reverse("admin:jobs_job_log", args=[job.pk]),
        }
        for url in page_urls(job):
            page = main_of(client.get(url))
            shown = CHART_CONTROLS.sub("", TAB_LIST.sub("", page))
            assert not ACTION.search(shown), (url, ACTION.search(shown))
            assert set(re.findall(r'(?:href|src|action|data-from)="([^"]*)"', shown)) <= known, url
            assert set(re.findall('value="([^"]*)"', TAB_LIST.search(page)[0])) == set(tab_urls(job)), url


def test_the_page_shows_what_the_customer_sees(customer, jobs):
    client = logged_in(operator("view_job"))
    failed, with_log = jobs[2], jobs[-1]
    overview = main_of(client.get(reverse("operator_job", args=[failed.pk])))
    assert "KeyError: 7" in overview
    assert f"{customer.workspace.name}/train.py" in overview
    for tab in set(operator_page.TAB_TITLES) - {operator_page.METRICS}:  # a script draws the metrics in both pages
        assert tab in job_page.TABS
    assert "Receipt R-" in main_of(client.get(reverse("operator_job", args=[failed.pk, "cost"])))
    assert "Read the whole log" in main_of(client.get(reverse("operator_job", args=[with_log.pk, "logs"])))
    answer = json.loads(client.get(reverse("operator_job_curves", args=[failed.pk])).content)
    assert (answer["job"], answer["curves"]) == (failed.pk, [])


def test_the_configuration_lacks_the_script(customer):
    customer.write("train.py", "print('the recipe')")
    job = customer.job()
    customer.write("train.py", "print('a new recipe')")
    shown = main_of(logged_in(operator("view_job")).get(reverse("operator_job", args=[job.pk, "configuration"])))
    assert job.script.sha256 in shown
    assert "has changed" in shown
    assert "recipe" not in shown


def test_the_page_mixes_no_organizations_opens_no_other_page_and_runs_no_inline_scripts(completed_job):
    membership = MembershipFactory(user=operator("view_job"), role=Role.OWNER)
    client = logged_in(membership.user)
    answer = client.get(reverse("operator_job", args=[completed_job.pk]))
    assert "unsafe" not in answer["Content-Security-Policy"]
    page, link_to_own_jobs = answer.content.decode(), f'href="{reverse("job_list")}"'
    assert membership.organization.name not in page
    assert link_to_own_jobs not in page
    assert link_to_own_jobs in client.get(reverse("overview")).content.decode()
    for name in ("job_detail", "job_files", "job_live", "job_metrics", "job_configuration", "job_cost"):
        assert client.get(reverse(name, args=[completed_job.pk])).status_code == 404, name
    for name in ("job_cancel", "job_edit", "job_tensorboard"):
        assert client.post(reverse(name, args=[completed_job.pk])).status_code == 404, name
