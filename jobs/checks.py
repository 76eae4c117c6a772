"""Image checks: free runs that test an image, its collectives and the mounts on some nodes, and their checklist.

A check is an order like any other, with a price of 0 and a daily limit. `runtime/launcher/smoke.py` runs on every rank
and writes a report with a finding for each test. The customer's image controls that process and can forge the report.
Reports are therefore read with limits and without following links. The type of each value is checked, and invalid ones
are ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop

from billing.quotes import make_free_quote
from console.accounts.models import Membership
from console.accounts.services import require_active
from jobs import free_runs, orders, quotas
from jobs.clusters import cluster
from jobs.errors import IdempotencyConflict, QuotaExceeded
from jobs.event_files import open_regular
from jobs.models import CHECK_SCRIPT, Job, Order, Product
from jobs.purchase import Placement, parse_placement
from runtime.errors import RuntimeFault
from storage.errors import StorageError
from storage.paths import open_folder

DEADLINE_SECONDS = 300
"""Time limit of a check. The tests take seconds; importing a large framework from slow storage can take minutes."""
MAX_REPORT_BYTES = 256 * 1024
"""Bytes of one rank's report that are read; a real one has a few KiB."""
MAX_RANKS = 512
"""Ranks whose reports are read, because each is a file to open while the page is built."""
MAX_FINDINGS = 1000
"""Findings of one report that are read. A real report has about a dozen, and one for each of up to 100 datasets."""
MAX_ERROR_LENGTH = 500
"""Characters of a finding's error that the checklist shows: a few lines."""
MAX_VALUE_LENGTH = 100
"""Characters of any other value of a finding that the checklist shows. Real ones are versions, names and numbers."""
PRODUCT = "image-check"
"""Name of the product that every check orders."""
CLOCK_TOLERANCE_SECONDS = 1.0
"""Largest accepted difference between two nodes' clocks. Metrics and logs are ordered by the clocks, to the second."""
MAX_TIME = 1e11
"""Reported times (Unix seconds) must be below this one, which is in the year 5138. So infinity is refused."""
MIN_FREE_BYTES = 1024**3
"""A writable folder with less free space fails its test, because a checkpoint of a common model needs about as much."""


@dataclass(frozen=True)
class CheckItem:
    """One line of the checklist, in the reader's language. `name` is the test's name in the report.

    `ok` is None if some rank has not run this test, because the run continues or ended too early.
    """

    name: str
    title: str
    ok: bool | None
    detail: str = ""
    remedy: str = ""


def place_check(*, membership: Membership, data: Mapping[str, Any], idempotency_key: str = "") -> Order:
    """Order a check.

    `data` has image, nodes and node_spec, and optionally framework, workspace, datasets and workers_per_node. A
    repeated idempotency key returns the same order. Raises ServiceInactive, NoWallet, InvalidInput, QuotaExceeded,
    and IdempotencyConflict if the key bought something else.
    """
    organization = membership.organization
    require_active(organization=organization)
    placement = parse_placement(organization=organization, data=data)
    with transaction.atomic():
        quota = quotas.lock_quota(organization)
        if idempotency_key and (existing := orders.order_with_key(organization, idempotency_key)):
            if not _ordered_by(existing, placement):
                raise IdempotencyConflict
            return existing
        _require_quota(membership, limit=quota.max_checks_per_day)
        quote = make_free_quote(
            organization=organization,
            user=membership.user,
            nodes=placement.nodes,
            deadline_seconds=DEADLINE_SECONDS,
            # `max_seconds` limits the running time: see `lifecycle.longest_seconds`.
            payload={"check": CHECK_SCRIPT, "max_seconds": DEADLINE_SECONDS} | placement.to_json(),
        )
        return orders.write_order(
            membership=membership,
            quote=quote,
            product=_product(),
            idempotency_key=idempotency_key or f"quote:{quote.pk}",  # an order needs a key that no other order has
            quota=quota,
            versions=placement.dataset_versions,
            columns=_job_columns(placement),
        )


def _ordered_by(order: Order, placement: Placement) -> bool:
    """Return whether an order is a check of this image and framework on these nodes.

    The workspace and the versions of datasets are not compared: their defaults may have changed since the order.
    """
    job, chosen = order.job, placement
    return (
        job.is_check
        and (job.framework, job.image_id) == (chosen.framework, chosen.image.pk)
        and job.node_spec_id == chosen.node_spec.pk
        and (job.nodes, job.workers_per_node) == (chosen.nodes, chosen.workers_per_node)
    )


def checklist(job: Job) -> list[CheckItem]:
    """Return one item per test, in the order shown. A test passes only if it passed on every rank."""
    reports = _reports(job)
    by_test: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for rank, report in sorted(reports.items()):
        for finding in report:
            by_test.setdefault(str(finding.get("name")), []).append((rank, finding))
    # A check without datasets has no finding about them, so its checklist has no line about them.
    return [_item(name, by_test.get(name, []), job) for name in _TITLES if name != "dataset" or "dataset" in by_test]


def _item(name: str, findings: list[tuple[int, dict[str, Any]]], job: Job) -> CheckItem:
    """Return the item of one test from its findings, which are (rank, finding) sorted by rank."""
    title, remedy = (str(text) for text in (_TITLES[name], _REMEDIES[name]))
    failed = [(rank, finding) for rank, finding in findings if finding.get("ok") is not True]
    if failed:
        rank, finding = failed[0]
        error = str(finding.get("error", ""))[:MAX_ERROR_LENGTH]
        detail = _("Rank %(rank)d: %(error)s") % {"rank": rank, "error": error}
        return CheckItem(name, title, ok=False, detail=detail, remedy=remedy)
    if len({rank for rank, _finding in findings}) < min(MAX_RANKS, job.nodes * job.workers_per_node):
        detail = _("Not all ranks reached this step.") if job.is_ended else ""
        return CheckItem(name, title, ok=None, detail=detail)
    data = [finding["data"] for _rank, finding in findings if isinstance(finding.get("data"), dict)]
    if name == "clock":
        return _clock_item(title, remedy, data)
    if name in _FOLDER_TESTS:
        return _folder_item(name, title, data)
    return CheckItem(name, title, ok=True, detail=_detail(name, data))


def _clock_item(title: str, remedy: str, data: list[dict[str, Any]]) -> CheckItem:
    """Compare the nodes' clocks.

    All ranks leave the same barrier at almost the same moment. `at` in each rank's data is that moment by its node's
    clock, in Unix seconds.
    """
    # The bounds exclude infinity and NaN, which the sentence cannot contain.
    times = [at for at in (values.get("at") for values in data) if isinstance(at, int | float) and 0 <= at < MAX_TIME]
    difference = max(times) - min(times) if times else 0.0
    detail = _("The nodes' clocks are within %(milliseconds)d ms of each other.") % {"milliseconds": difference * 1000}
    return CheckItem("clock", title, ok=difference <= CLOCK_TOLERANCE_SECONDS, detail=detail, remedy=remedy)


def _folder_item(name: str, title: str, data: list[dict[str, Any]]) -> CheckItem:
    """Return the item of a folder that every rank could write to. It fails if little space is free on some node."""
    free_bytes = min((values["free_bytes"] for values in data if isinstance(values.get("free_bytes"), int)), default=0)
    detail = _("Writable, %(free)d GiB free.") % {"free": free_bytes >> 30}
    remedy = _(
        "Little disk space is left. Delete files that you no longer need, or ask the administrator for more disk."
    )
    return CheckItem(name, title, ok=free_bytes >= MIN_FREE_BYTES, detail=detail, remedy=remedy)


def _detail(name: str, data: list[dict[str, Any]]) -> str:
    """Return details of a passed test, mostly of the first rank. Texts are cut, because reports may have long ones."""
    first = {key: _shown(value) for key, value in data[0].items()} if data else {}
    if name == "framework":
        return "{framework} {version}, {device}".format_map(_WithDash(first))
    if name == "python":
        return _("Python %(version)s on %(cpus)s cores") % _WithDash(first)
    if name == "sum":
        return _("The sum over all %(ranks)s ranks is correct; 4 MiB take %(milliseconds)s ms.") % _WithDash(first)
    if name == "dataset":
        files = {_shown(values.get("name")): _shown(values.get("files")) for values in data}
        return ", ".join(_("%(name)s: %(files)s files") % {"name": name, "files": files[name]} for name in files)
    return ""


def _shown(value: object) -> str:
    """Return a value of a finding as the checklist shows it."""
    return str(value)[:MAX_VALUE_LENGTH]


class _WithDash(dict[str, str]):
    """Values that a sentence contains. A dash replaces a value that the report lacks."""

    def __missing__(self, key: str) -> str:
        return "–"


def _reports(job: Job) -> dict[int, list[dict[str, Any]]]:
    """Return the findings of the latest attempt by rank. Missing and unreadable reports are left out."""
    attempt = job.attempts.last()
    if attempt is None:
        return {}
    ranks = min(MAX_RANKS, attempt.granted_nodes * job.workers_per_node)  # the ranks that this attempt has
    reports = {}
    with (
        # RuntimeFault: the settings no longer name the cluster. The other two: the folder is missing, or the run's code
        # replaced it by a link.
        contextlib.suppress(RuntimeFault, OSError, StorageError),
        # `run` is the RUN_DIR of the ranks, in which `smoke.py` creates `check`.
        open_folder(root=cluster(attempt.backend).run_folder(attempt.run_name), parts=("run", "check")) as folder,
    ):
        for rank in range(ranks):
            findings = _findings(f"rank-{rank}.json", folder)
            if findings is not None:
                reports[rank] = findings
    return reports


def _findings(name: str, folder: int) -> list[dict[str, Any]] | None:
    """Return the findings of a report in an open folder; None if it is missing or unreadable."""
    file = open_regular(name, folder=folder)
    if file is None:
        return None
    with file:
        try:
            report = json.loads(file.read(MAX_REPORT_BYTES))
        except (ValueError, RecursionError):  # RecursionError: deeply nested JSON
            return None
    findings = report.get("findings") if isinstance(report, dict) else None
    if not isinstance(findings, list):
        return None
    return [finding for finding in findings[:MAX_FINDINGS] if isinstance(finding, dict)]


def _job_columns(placement: Placement) -> dict[str, Any]:
    """Return the columns of the check's job. The script ignores epochs, learning rate and batch size."""
    # Groups the checks of an image, as `Purchase.code_key` groups the trainings of a script.
    code_key = hashlib.sha256(f"{CHECK_SCRIPT}:{placement.image.pk}".encode()).hexdigest()
    return {
        "name": f"Check of {placement.image.name}",  # `selectors.title_of` shows it in the reader's language
        "framework": placement.framework,
        "image": placement.image,
        "workspace": placement.workspace,
        "code_path": "",
        "builtin_script": CHECK_SCRIPT,
        "epochs": 1,
        "lr": "0.01",
        "batch_size": 1,
        "node_spec": placement.node_spec,
        "nodes": placement.nodes,
        "workers_per_node": placement.workers_per_node,
        "code_key": code_key,
    }


def _require_quota(membership: Membership, *, limit: int) -> None:
    """Raise QuotaExceeded if the organization or the user has ordered `limit` checks in the last 24 hours."""
    user = membership.user
    free_runs.lock_user(user)
    if not free_runs.left_today(free_runs.CHECKS, organization=membership.organization, user=user, limit=limit):
        sentence = _(
            "The free checks of the last 24 hours are used up. The limit is %(most)d per organization, "
            "and per person across all organizations. Try again later."
        )
        raise QuotaExceeded(sentence % {"most": limit})


def _product() -> Product:
    """Return the product of checks, created if it is missing. It is inactive, so that no list of products shows it."""
    product, _created = Product.objects.get_or_create(
        name=PRODUCT,
        defaults={"title": gettext_noop("Check of an image"), "is_active": False, "max_seconds": DEADLINE_SECONDS},
    )
    return product


_FOLDER_TESTS = frozenset({"workspace", "checkpoint_dir", "output_dir", "run_dir"})
"""The tests of writable folders, which report the free space."""
_TITLES = {
    "environment": gettext_lazy("Environment"),
    "python": gettext_lazy("Python"),
    "framework": gettext_lazy("Framework"),
    "names": gettext_lazy("Node names"),
    "meeting": gettext_lazy("Rendezvous"),
    "sum": gettext_lazy("All-reduce"),
    "broadcast": gettext_lazy("Broadcast"),
    "clock": gettext_lazy("Clocks"),
    "dataset": gettext_lazy("Datasets"),
    "workspace": gettext_lazy("Workspace"),
    "checkpoint_dir": gettext_lazy("Checkpoints"),
    "output_dir": gettext_lazy("Outputs"),
    "run_dir": gettext_lazy("Results"),
}
"""Title of each test by its name in the report, in the order of the checklist."""
_REMEDIES = {
    "environment": gettext_lazy(
        "The platform did not set the promised environment variables. Contact the administrator."
    ),
    "python": gettext_lazy("Python does not work in this image. Use an image with Python 3.8 or later."),
    "framework": gettext_lazy(
        "The framework can't be imported in this image. Install a version that fits the image's Python "
        "and the nodes' GPUs, or choose another image."
    ),
    "names": gettext_lazy(
        "A node can't resolve the name of another node. Ask the administrator to check the cluster's DNS."
    ),
    "meeting": gettext_lazy(
        "The ranks could not connect to each other. Check that the image's framework supports these "
        "nodes (Gloo on CPU, NCCL on GPU), and ask the administrator to check the network between nodes."
    ),
    "sum": gettext_lazy("A collective failed or returned a wrong result. Use another version of the framework."),
    "broadcast": gettext_lazy("A collective failed or returned a wrong result. Use another version of the framework."),
    "clock": gettext_lazy("The nodes' clocks differ. Ask the administrator to set up time synchronization."),
    "dataset": gettext_lazy(
        "A dataset can't be read. Publish a new version of it. If that fails too, contact the administrator."
    ),
    "workspace": gettext_lazy("The workspace is not writable. Contact the administrator."),
    "checkpoint_dir": gettext_lazy("Checkpoints can't be written. Contact the administrator."),
    "output_dir": gettext_lazy("Outputs can't be written. Contact the administrator."),
    "run_dir": gettext_lazy("Results can't be written. Contact the administrator."),
}
"""What to do if a test fails, by the test's name."""
