"""An organization with one of everything that a page can show. Its runs ran on the fake cluster."""

import base64
import json
import struct
import time
import zlib

from allauth.idp.oidc.models import Client, Token
from django.utils import timezone

from billing import auto_topup, budgets, credit, customers, invoices, payments
from billing.models import Voucher
from console.accounts import invitations, service_accounts
from console.accounts.roles import Role
from console.notifications import delivery
from console.notifications import services as webhooks
from jobs import checks, dispatch, reconciliation, results
from jobs.models import MetricPoint
from runtime.specs import Outcome
from storage import images, recycle_bin, selectors
from tests.factories.accounts import MembershipFactory
from tests.factories.jobs import make_medium_too_large, start
from tests.factories.notebooks import sell_notebook
from tests.factories.storage import (
    LINEAGE,
    DatasetFactory,
    DatasetVersionFactory,
    ModelFactory,
    ModelVersionFactory,
    WorkspaceImportFactory,
)
from tests.factories.sweeps import Sweeper

HOUR = 3600.0
PNG = b"\x89PNG\r\n\x1a\n" + b"".join(
    struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    for kind, data in (
        (b"IHDR", struct.pack(">IIBBBBB", 32, 32, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress((b"\0" + bytes(range(0, 256, 8))) * 32)),
        (b"IEND", b""),
    )
)
"""A picture of 32 by 32 shades of gray."""
TRACEBACK = """Traceback (most recent call last):
  File "/workspace/train.py", line 1, in <module>
    print('hello')
ValueError: no such shape
"""

HUB_ADDRESS = "https://hub.example.com/hub/oauth_callback"


def furnish(customer, provider):
    """Fill the organization. Return the ids that URLs contain: of jobs by state, a receipt, invoices, an invitation."""
    organization, user = customer.organization, customer.membership.user
    user.is_staff = user.is_superuser = True
    user.save()
    MembershipFactory(organization=organization, role=Role.MEMBER)
    customer.quota(max_running_nodes=6)  # so that the job of four nodes stays in the queue
    _fill_storage(customer)
    jobs = _run_jobs(customer)
    customer.write("requirements.txt", "einops\n")
    _pay(customer, provider)
    receipt = customer.organization.receipts.latest("pk")
    invoice = invoices.issue(organization=organization, user=user)
    assert invoice is not None
    line, left = next((line, left) for line, left in invoices.correctable_lines(invoice) if left)
    note = invoices.correct(invoice=invoice, amounts={line.pk: left}, reason="Goodwill", user=user)
    offer = invitations.invite(organization=organization, email="new@example.com", role=Role.VIEWER, actor=user)
    hub = Client.objects.create(name="JupyterHub", redirect_uris=HUB_ADDRESS, scopes="openid\nnotebooks")
    Token.objects.create(client=hub, user=user, type=Token.Type.REFRESH_TOKEN, hash="hash")
    return jobs | {
        "client": hub.pk,
        "receipt": receipt.pk,
        "invoice": invoice.pk,
        "note": note.pk,
        "invitation": invitations.token_of(offer),
    }


def _fill_storage(customer):
    dataset = DatasetFactory(organization=customer.organization, name="digits", description="Handwritten digits")
    version = DatasetVersionFactory(dataset=dataset, number=1)
    folder = selectors.version_folder(version)
    (folder / "README.md").write_text("# Digits\n\nHandwritten digits.\n")
    (folder / "labels.csv").write_text("file,label\n0.png,7\n1.png,2\n")
    (folder / "0.png").write_bytes(PNG)
    (folder / "raw").mkdir()
    (folder / "raw" / "weights.bin").write_bytes(bytes(100))
    DatasetVersionFactory(dataset=dataset, number=2)
    DatasetFactory(organization=customer.organization, name="empty")
    WorkspaceImportFactory(
        organization=customer.organization, name="nanogpt", error="The repository can't be read.",
        ended_at=timezone.now(),
    )  # fmt: skip
    model = ModelFactory(organization=customer.organization, name="net", description="Reads digits")
    metrics = {"loss": {"last": 0.2, "lowest": 0.1, "highest": 0.9}}
    ModelVersionFactory(model=model, lineage=LINEAGE | {"metrics": metrics})
    ModelVersionFactory(model=model)
    ModelVersionFactory(model=ModelFactory(organization=customer.organization, name="m" * 63))  # the longest name
    customer.write("notes/plan.md", "# Plan\n")
    (customer.folder / "notes" / "curve.png").write_bytes(PNG)
    code = {"cell_type": "code", "source": "plot()", "execution_count": 1, "outputs": [
        {"output_type": "stream", "name": "stdout", "text": "loss 0.5"},
        {"output_type": "error", "traceback": ["ValueError"]},
        {"output_type": "display_data", "data": {"image/png": base64.b64encode(PNG).decode()}},
    ]}  # fmt: skip
    customer.write("notes/plot.ipynb", json.dumps({"cells": [{"cell_type": "markdown", "source": "# Plot"}, code]}))
    workspace = selectors.workspace_named(customer.organization, "main")
    for written, deleted in (("old.py", "old.py"), ("older/x", "older")):  # the bin shows a file and a folder
        customer.write(written, "print(1)")
        recycle_bin.delete(workspace=workspace, path=deleted, user=customer.membership.user)
    images.create_image(
        organization=customer.organization,
        user=customer.membership.user,
        name="ours",
        title="Ours",
        reference=f"registry.example.com/{'r' * 200}:1",
        frameworks=["pytorch"],
    )


def _run_jobs(customer):
    backend, now = customer.backend, time.time()
    # Runs of the past have a `max_seconds` that ends after now: else the fake cluster ends them at their time limit.
    succeeded = customer.started(at=now - 3 * HOUR, max_seconds=14_400, arguments="--seed 1", datasets="digits")
    _write_curves(succeeded.job_id)
    _write_files(backend, succeeded)
    customer.end(succeeded, Outcome.COMPLETED, at=now - 2 * HOUR)
    failed = customer.started(at=now - 2 * HOUR, max_seconds=14_400)
    backend.write(failed.run_name, TRACEBACK, rank=1)
    customer.end(failed, Outcome.CODE_FAILED, at=now - HOUR, message="Rank 1: ValueError: no such shape", rank=1)
    hung = customer.started(at=now - HOUR, max_seconds=7200, nodes=3, min_nodes=1)
    backend.shrink(hung.run_name, 2, at=now - 2000)
    backend.hang(hung.run_name, at=now - 500, progress_at=now - 1200)
    check = checks.place_check(
        membership=customer.membership, data={"image": "pytorch", "node_spec": "nano", "nodes": 1}
    ).job
    start(check)
    customer.end(check.attempts.get(), Outcome.COMPLETED)
    reconciliation.reconcile()
    sweeper = Sweeper(customer)
    sweep = sweeper.buy(trials=8)  # enough for the importance of parameters, which needs five
    sweeper.finish(sweep)
    notebook = sell_notebook(customer)
    running = customer.started(at=now - 60, datasets="digits")
    _write_curves(running.job_id)
    for node in (0, 1):
        for seconds in range(0, 60, 2):
            backend.sample(running.run_name, _sample(node, now - 60 + seconds), node=node)
    start(customer.job())  # it stays in the state STARTING
    make_medium_too_large()  # so that pages show a node spec that no cluster can run
    queued = customer.job(nodes=4)
    dispatch.dispatch_queue()
    robot = service_accounts.create(actor=customer.membership, name="builds", role="member")
    service_accounts.create_token(account=robot, actor=customer.membership, name="ci")
    hook, _secret = webhooks.create_webhook(membership=customer.membership, url="https://hooks.example.com/runs")
    delivery.create_deliveries()
    return {
        "robot": robot.pk,
        "webhook": hook.pk,
        "sweep": sweep.pk,
        "notebook": notebook.job_id,
        "succeeded": succeeded.job_id,
        "failed": failed.job_id,
        "hung": hung.job_id,
        "check": check.pk,
        "running": running.job_id,
        "queued": queued.pk,
    }


def _write_files(backend, attempt):
    """Write one output of each kind that a page can show, and a log."""
    outputs = backend.output_folder(results.checkpoint_key(attempt.job_id))
    (outputs / "samples").mkdir(parents=True)
    (outputs / "loss.csv").write_text("epoch,loss\n" + "".join(f"{epoch},{1 / epoch}\n" for epoch in range(1, 9)))
    (outputs / "report.json").write_text('{"accuracy": 0.98, "classes": ["zero", "one"]}')
    (outputs / "notes.txt").write_text("<b>Trained</b> on digits\n")
    (outputs / "model.pt").write_bytes(bytes(range(256)) * 64)
    (outputs / "curve.png").write_bytes(PNG)
    logs = backend.run_folder(attempt.run_name) / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_text("epoch 1 loss 0.5\n")


def _sample(node, at):
    """Return a sample of a node with one rank. Node 1 waits for node 0, which pages show as the slower one."""
    rank = {"rank": node, "cpu": 0.4, "memory": 2e8, "steps": 20, "step_seconds": 1.9, "comm_seconds": 0.2 + node}
    use = {"cpu": 0.45, "memory": 3e8, "net_rx": 1e5, "net_tx": 1e5, "disk_read": 0, "disk_write": 1e4}
    return {"at": at, **use, "ranks": [rank]}


def _write_curves(job):
    now = timezone.now()
    MetricPoint.objects.bulk_create(
        MetricPoint(job_id=job, attempt=1, name=name, position=step, step=step, value=1 / (step + 1), at=now)
        for name in ("loss", "accuracy")
        for step in range(50)
    )


def _pay(customer, provider):
    account, user = customer.wallet, customer.membership.user
    top_up = payments.start_top_up(account=account, amount_minor=5000, user=user, save_card=True)
    provider.pay(top_up.session_id)
    provider.deliver()
    payments.start_top_up(account=account, amount_minor=2000, user=user, save_card=False)  # stays open: a page shows it
    card = customers.saved_cards(customer.organization)[0].card
    auto_topup.switch_on(account=account, threshold_minor=500, amount_minor=2000, method_id=card.method_id, user=user)
    Voucher.objects.create(code="WELCOME", reason="Welcome", amount_minor=500, currency="USD")
    credit.redeem(account=account, code="WELCOME", user=user)
    budgets.set_budget(membership=customer.membership, user=None, amount_minor=5000)
