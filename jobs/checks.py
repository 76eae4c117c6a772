"""A free run that checks an image, its collectives and the mounts on chosen nodes, and what it found, in words.

It is bought, held and receipted as any run is, at 0; what limits it is a quota. The one rule: what its report says was
written inside the run, so it is read as any customer's file: bounded, leniently, following no link.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from billing.quotes import make_free_quote
from console.accounts.errors import InvalidInput
from console.accounts.models import Membership, Organization
from console.accounts.services import require_active
from jobs import fields, orders, queue
from jobs.backend import cluster
from jobs.errors import QuotaExceeded
from jobs.models import Job, Order, Product
from jobs.purchase import Choices, read_choices
from jobs.tensorboard import open_regular
from runtime.errors import RuntimeFault

SCRIPT = "smoke"
DEADLINE_SECONDS = 300
LARGEST_REPORT = 256 * 1024
MOST_RANKS = 512
PRODUCT = "image-check"
CLOCK_TOLERANCE_SECONDS = 1.0
LEAST_FREE_BYTES = 1024**3


@dataclass(frozen=True)
class Item:
    """One line of the checklist. `ok` is None where the run ended before it came to this."""

    name: str
    title: str
    ok: bool | None
    detail: str = ""
    remedy: str = ""


def place_check(*, membership: Membership, data: Mapping[str, Any], idempotency_key: str = "") -> Order:
    """Buy a check: `image`, `node_spec`, `nodes`; `framework`, `workspace`, `datasets` and `workers_per_node` may be.

    Raises ServiceInactive, NoWallet, InvalidInput, QuotaExceeded. The same key again gives the same order.
    """
    organization = membership.organization
    require_active(organization=organization)
    reader = fields.Reader(data)
    choices = read_choices(reader, organization=organization)
    if reader.faults or choices is None:
        raise InvalidInput(fields=reader.faults)
    with transaction.atomic():
        quota = queue.locked_quota(organization)
        if idempotency_key and (known := orders.order_by_key(organization, idempotency_key)):
            return known
        _require_room(organization, quota.max_checks_per_day)
        quote = make_free_quote(
            organization=organization,
            user=membership.user,
            nodes=choices.nodes,
            deadline_seconds=DEADLINE_SECONDS,
            payload={"check": SCRIPT, "max_seconds": DEADLINE_SECONDS} | choices.to_json(),
        )
        return orders.write_order(
            membership=membership,
            quote=quote,
            product=_product(),
            key=idempotency_key or f"quote:{quote.pk}",
            quota=quota,
            versions=choices.dataset_versions,
            job=_job(choices),
        )


def checklist(job: Job) -> list[Item]:
    """What a check found, over all ranks: the worst word for each of its parts."""
    reports = _reports(job)
    found: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for rank, report in sorted(reports.items()):
        for finding in report:
            found.setdefault(str(finding.get("name")), []).append((rank, finding))
    return [_item(name, found.get(name, []), job) for name in _TITLES if name != "dataset" or "dataset" in found]


def _item(name: str, findings: list[tuple[int, dict[str, Any]]], job: Job) -> Item:
    title, remedy = (str(text) for text in (_TITLES[name], _REMEDIES[name]))
    bad = [(rank, finding) for rank, finding in findings if finding.get("ok") is not True]
    if bad:
        rank, finding = bad[0]
        told = _("Rank %(rank)d: %(error)s") % {"rank": rank, "error": str(finding.get("error", ""))[:500]}
        return Item(name, title, ok=False, detail=told, remedy=remedy)
    if len({rank for rank, _finding in findings}) < job.nodes * job.workers_per_node:
        missing = job.is_ended
        return Item(name, title, ok=None, detail=_("Not every rank came to this.") if missing else "", remedy="")
    data = [finding["data"] for _rank, finding in findings if isinstance(finding.get("data"), dict)]
    if name == "clock":
        return _clock(title, remedy, data)
    if name in _FOLDERS:
        return _folder(name, title, data)
    return Item(name, title, ok=True, detail=_detail(name, data))


def _clock(title: str, remedy: str, data: list[dict[str, Any]]) -> Item:
    times = [at for at in (each.get("at") for each in data) if isinstance(at, int | float)]
    apart = max(times) - min(times) if times else 0.0
    told = _("The nodes' clocks are within %(milliseconds)d ms of each other.") % {"milliseconds": apart * 1000}
    return Item("clock", title, ok=apart <= CLOCK_TOLERANCE_SECONDS, detail=told, remedy=remedy)


def _folder(name: str, title: str, data: list[dict[str, Any]]) -> Item:
    free = min((each["free_bytes"] for each in data if isinstance(each.get("free_bytes"), int)), default=0)
    told = _("Writable; %(free)d GiB are free.") % {"free": free >> 30}
    little = _("There is little room: delete what is not needed, or ask the administrator for more disk.")
    return Item(name, title, ok=free >= LEAST_FREE_BYTES, detail=told, remedy=little)


def _detail(name: str, data: list[dict[str, Any]]) -> str:
    """What is worth knowing of a check that went well; texts come from inside the run, so they are cut short."""
    first = {key: str(value)[:100] for key, value in data[0].items()} if data else {}
    if name == "framework":
        return "{framework} {version}, {device}".format_map(_Known(first))
    if name == "python":
        return _("Python %(version)s on %(cpus)s cores") % _Known(first)
    if name == "sum":
        return _("All %(ranks)s ranks add up; 4 MiB take %(milliseconds)s ms.") % _Known(first)
    if name == "dataset":
        names = {str(each.get("name"))[:100]: str(each.get("files"))[:20] for each in data}
        return ", ".join(_("%(name)s: %(files)s files") % {"name": each, "files": names[each]} for each in names)
    return ""


class _Known(dict[str, str]):
    """What is not told is a dash."""

    def __missing__(self, key: str) -> str:
        return "–"


def _reports(job: Job) -> dict[int, list[dict[str, Any]]]:
    """Each rank's findings, as far as they were written."""
    attempt = job.attempts.last()
    if attempt is None:
        return {}
    try:
        folder = cluster(attempt.backend).run_folder(attempt.run_name) / "run" / "check"
    except RuntimeFault:
        return {}
    reports = {}
    for rank in range(min(MOST_RANKS, attempt.granted_nodes * job.workers_per_node)):
        file = open_regular(folder / f"rank-{rank}.json")
        if file is None:
            continue
        with file:
            try:
                told = json.loads(file.read(LARGEST_REPORT))
            except (ValueError, RecursionError):
                continue
        findings = told.get("findings") if isinstance(told, dict) else None
        if isinstance(findings, list):
            reports[rank] = [finding for finding in findings[:1000] if isinstance(finding, dict)]
    return reports


def _job(choices: Choices) -> dict[str, Any]:
    key = hashlib.sha256(f"{SCRIPT}:{choices.image.pk}".encode()).hexdigest()
    return {
        "name": _("Check of %(image)s") % {"image": choices.image.name},
        "framework": choices.framework,
        "image": choices.image,
        "workspace": choices.workspace,
        "code_path": "",
        "builtin_script": SCRIPT,
        "epochs": 1,
        "lr": "0.01",
        "batch_size": 1,
        "node_spec": choices.node_spec,
        "nodes": choices.nodes,
        "workers_per_node": choices.workers_per_node,
        "code_key": key,
    }


def _require_room(organization: Organization, most: int) -> None:
    since = timezone.now() - timedelta(days=1)
    made = Job.objects.filter(organization=organization, builtin_script=SCRIPT, queued_at__gt=since).count()
    if made >= most:
        raise QuotaExceeded(
            _("Your organization has used its %(most)d free checks of the last 24 hours. Try again later.")
            % {"most": most}
        )


def _product() -> Product:
    """What an order of a check names; it is on no list of offers."""
    product, _made = Product.objects.get_or_create(
        name=PRODUCT, defaults={"title": "Check of an image", "is_active": False, "max_seconds": DEADLINE_SECONDS}
    )
    return product


_FOLDERS = frozenset({"workspace", "checkpoint_dir", "run_dir"})
_TITLES = {
    "environment": gettext_lazy("Environment"),
    "python": gettext_lazy("Python"),
    "framework": gettext_lazy("Framework"),
    "names": gettext_lazy("Names of the nodes"),
    "meeting": gettext_lazy("The ranks meet"),
    "sum": gettext_lazy("All-reduce"),
    "broadcast": gettext_lazy("Broadcast"),
    "clock": gettext_lazy("Clocks"),
    "dataset": gettext_lazy("Datasets"),
    "workspace": gettext_lazy("Workspace"),
    "checkpoint_dir": gettext_lazy("Checkpoints"),
    "run_dir": gettext_lazy("Results"),
}
"""The checklist in the order it is shown."""
_REMEDIES = {
    "environment": gettext_lazy("The platform did not tell the run what it promises. Tell the administrator."),
    "python": gettext_lazy("The image's Python does not work. Use an image with Python 3.8 or later."),
    "framework": gettext_lazy(
        "The framework can't be imported in this image. Install it there, in a version that fits the image's Python "
        "and the node's GPUs, or choose another image."
    ),
    "names": gettext_lazy(
        "A node can't find another by its name. Tell the administrator: the cluster's name service is amiss."
    ),
    "meeting": gettext_lazy(
        "The ranks did not find each other. Check that the framework in the image was built for these nodes (Gloo on "
        "CPU, NCCL on GPU), and tell the administrator that the nodes can't talk."
    ),
    "sum": gettext_lazy("The collective gave a wrong result, or failed. Use another version of the framework."),
    "broadcast": gettext_lazy("The collective gave a wrong result, or failed. Use another version of the framework."),
    "clock": gettext_lazy("The clocks of the nodes differ. Tell the administrator: they need a time service."),
    "dataset": gettext_lazy(
        "A dataset can't be read. Publish a new version of it, and tell the administrator if that fails too."
    ),
    "workspace": gettext_lazy("The workspace can't be written. Tell the administrator."),
    "checkpoint_dir": gettext_lazy("Checkpoints can't be written. Tell the administrator."),
    "run_dir": gettext_lazy("Results can't be written. Tell the administrator."),
}
