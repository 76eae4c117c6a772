"""Pages of a large installation: 1,000,000 jobs, 10,000 organizations, 5,000,000 ledger entries, 8 users.

make bench NAME=large_pages (QUICK=1 for a tenth of the rows)

The measured organization has a tenth of all jobs. For each page in turn, eight users open it every second; pages of the
administration are opened by an administrator. A figure is the 95th percentile of the time from request to response, on
this machine. About a millisecond of that time is the client's own. `cpu_ms` is the CPU time of web server and database
for a response. Other load on the machine changes `cpu_ms` little.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import psutil

from bench import cpu_use, http_load, rounds
from bench.environment import free_console_port, images_root, temporary_installation
from bench.many_rows import fill
from bench.pages import create_customer, serve_console

REDUCTION = 10 if rounds.is_quick() else 1
"""The divisor of all numbers of rows."""
JOBS, ORGANIZATIONS, ENTRIES = 1_000_000 // REDUCTION, 10_000 // REDUCTION, 5_000_000 // REDUCTION
USERS = 8
"""How many users open a page at once."""
WARM_UP_CLIENTS, WARM_UP_SECONDS = 32, 5.0
"""The load of each page before it is measured, by more clients than the server has threads. It starts threads and
fills caches. It also outlasts the first ten executions of each statement in a connection. After five, psycopg prepares
the statement. PostgreSQL plans the next five for their own values. From then on it may use one plan for all values,
which can be slower."""
SECONDS = 8.0 if rounds.is_quick() else 15.0
"""How long each page is requested."""
LISTS = (
    "overview", "job_list", "sweep_list", "dataset_list", "model_list", "workspace_list", "receipt_list", "wallet",
    "cost_list", "credit_list", "invoice_list", "organization", "audit_log", "notification_list", "status",
    "training_new", "storage_usage",
)  # fmt: skip
"""Names of the URLs of a member's lists and forms."""
SEARCHES = {
    "job_list, by name": "job_list?q=training+12",
    "job_list, by state": "job_list?state=failed",
    "job_list, by member": "job_list?member=copy-1%40example.com&filters=1",
    "job_list, by cost": "job_list?sort=cost",
    "receipt_list, by name": "receipt_list?q=training+12",
}
"""Searches: the title in the figures, and the name of the URL with the query."""
ADMIN = (
    "index", "jobs_job_changelist", "jobs_order_changelist", "billing_quote_changelist", "billing_hold_changelist",
    "billing_receipt_changelist", "billing_transaction_changelist", "billing_account_changelist",
    "accounts_organization_changelist", "accounts_user_changelist", "accounts_auditevent_changelist",
)  # fmt: skip
"""Names of the URLs of pages of the administration."""
GOAL_MS = 150
"""Longest 95th percentile that a page should have."""


def main() -> None:
    """Fill the database, measure every page, then print the table and the JSON object."""
    url = f"http://127.0.0.1:{free_console_port()}"
    with temporary_installation(TRAINYARD_URL=url, TRAINYARD_IMAGES_ROOT=str(images_root())) as settings:
        from django.core.management import call_command  # noqa: PLC0415 - Django must be set up first

        call_command("collectstatic", interactive=False, verbosity=0)
        customer = create_customer(Path(os.environ["TRAINYARD_VAR"]))
        fill(customer, organizations=ORGANIZATIONS, jobs=JOBS, own_jobs=JOBS // 10, entries=ENTRIES)
        figures = measure(settings, url, customer)
    rounds.print_table(f"{USERS} users, milliseconds", figures)
    slow = [name for name, figure in figures.items() if figure["p95"] > GOAL_MS]
    print(f"above {GOAL_MS} ms: {', '.join(slow) or 'none'}")
    slowest_p95 = max(figure["p95"] for figure in figures.values())
    rounds.print_result("large_pages", figures, {"slowest_p95_vs_goal": slowest_p95 / GOAL_MS})


def measure(settings: Any, url: str, customer: Any) -> dict[str, rounds.Figure]:
    """Return median, 95th percentile and maximum of each page's response time, in milliseconds."""
    from tests.factories.accounts import UserFactory  # noqa: PLC0415 - Django must be set up first

    administrator = UserFactory(is_staff=True, is_superuser=True)
    member, operator = _cookie(settings, url, customer.membership.user), _cookie(settings, url, administrator)
    figures = {}
    # Only the web server: the other processes would issue the invoices of seven months for all organizations at once.
    with serve_console(url, "serve", "web") as server:
        pages = [
            *((name, path, member) for name, path in member_pages(customer).items()),
            *((name, path, operator) for name, path in admin_pages(customer).items()),
        ]

        def load(path: str, cookie: str, clients: int, seconds: float, interval_seconds: float) -> http_load.Responses:
            responses = http_load.run(
                port=int(settings.WEB_BIND.rpartition(":")[2]),
                paths=[path],
                cookie=cookie,
                clients=clients,
                seconds=seconds,
                interval_seconds=interval_seconds,
            )
            if responses.failed:
                raise SystemExit(f"{responses.failed} requests of {path} were not answered with 200")
            return responses

        for name, path, cookie in pages:
            load(path, cookie, clients=WARM_UP_CLIENTS, seconds=WARM_UP_SECONDS, interval_seconds=0.0)
            cpu_before = _cpu_seconds(server, settings)
            responses = load(path, cookie, clients=USERS, seconds=SECONDS, interval_seconds=1.0)
            milliseconds = [seconds * 1000 for seconds in responses.seconds]
            p95 = round(statistics.quantiles(milliseconds, n=20)[-1], 3)
            cpu_ms = round((_cpu_seconds(server, settings) - cpu_before) * 1000 / len(responses.seconds), 3)
            figures[name] = rounds.summary(milliseconds) | {"p95": p95, "cpu_ms": cpu_ms}
            print(f"{name:36}{p95:12.1f} ms{cpu_ms:12.1f} ms of CPU time", flush=True)
    return figures


def member_pages(customer: Any) -> dict[str, str]:
    """Return the path of each list, search and detail page of a member."""
    from django.urls import reverse  # noqa: PLC0415 - Django must be set up first

    job = customer.organization.jobs.latest("pk")
    oldest = customer.organization.jobs.earliest("pk")
    searches = {title: page.partition("?") for title, page in SEARCHES.items()}
    return (
        {name: reverse(name) for name in LISTS}
        | {title: f"{reverse(name)}?{query}" for title, (name, _mark, query) in searches.items()}
        | {
            "job_list, the last page": f"{reverse('job_list')}?before={oldest.pk}",
            "job_detail": reverse("job_detail", args=[job.pk]),
            "job_detail, cost": f"{reverse('job_detail', args=[job.pk])}?tab=cost",
            "job_cost": reverse("job_cost", args=[job.pk]),
            "receipt_detail": reverse("receipt_detail", args=[job.order.hold.receipt.pk]),
        }
    )


def admin_pages(customer: Any) -> dict[str, str]:
    """Return the path of each page of the administration."""
    from django.urls import reverse  # noqa: PLC0415 - Django must be set up first

    job = customer.organization.jobs.latest("pk")
    return {f"admin {name}": reverse(f"admin:{name}") for name in ADMIN} | {
        "admin job": reverse("admin:jobs_job_change", args=[job.pk])
    }


def _cpu_seconds(server: psutil.Process, settings: Any) -> float:
    """Return the CPU time that web server and database have used."""
    parts = cpu_use.cpu_seconds_by_part(server, settings.EMBEDDED.processes())
    return parts["web"] + parts["postgres"]


def _cookie(settings: Any, url: str, user: Any) -> str:
    from django.test import Client  # noqa: PLC0415 - Django must be set up first

    client = Client(headers={"host": url.removeprefix("http://")})
    client.force_login(user)
    return str(client.cookies[settings.SESSION_COOKIE_NAME].OutputString(attrs=[]))


if __name__ == "__main__":
    main()
