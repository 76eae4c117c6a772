"""Packages of a requirements file: installed once for an organization, before the job that waits for them starts."""

from datetime import timedelta

import pytest
from django.utils import timezone

from billing.models import Receipt
from console.accounts.models import Closure
from jobs import closure, clusters, dispatch, free_estimates, orders, packages, reruns, selectors
from jobs.errors import QuotaExceeded
from jobs.models import CapacitySnapshot, Job, PackageLayer
from jobs.run_specs import run_spec
from jobs.states import EndReason, JobState
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.errors import BackendUnavailable
from runtime.packages import builder, layers
from runtime.packages.builder import InstallResult
from runtime.packages.layers import Layer
from runtime.specs import Outcome
from storage.models import Image
from tests.factories.jobs import Customer
from tests.racing import together

States = PackageLayer.States


@pytest.fixture
def customer(db, backend):
    """A customer with a requirements file beside the script."""
    created = Customer(backend)
    created.write("requirements.txt", "einops\nujson>5\n")
    return created


class Installer:
    """Stands in for the installer's processes: `results` by a layer's key, and `busy` organizations."""

    def __init__(self, monkeypatch):
        self.started = []
        self.results = {}
        self.busy = set()
        self.errors = []  # of the next starts
        monkeypatch.setattr(builder, "start", self.start)
        monkeypatch.setattr(builder, "result_of", lambda layer: self.results.get(layer.key))
        monkeypatch.setattr(builder, "remove_result", lambda layer: self.results.pop(layer.key, None))
        monkeypatch.setattr(builder, "last_started_at", self.last_started_at)
        monkeypatch.setattr(builder, "is_working", lambda layer: layer.organization_id in self.busy)

    def start(self, layer, request):
        if self.errors:
            raise self.errors.pop()
        self.started.append((layer, request))
        self.busy.add(layer.organization_id)

    def last_started_at(self, layer):
        starts = [
            number for number, (each, _) in enumerate(self.started, 1) if each.organization_id == layer.organization_id
        ]
        return max(starts, default=0)

    def end(self, reason="", **values):
        """End the last installation. Return the clusters on which jobs can start then."""
        layer: Layer = self.started[-1][0]
        self.busy.remove(layer.organization_id)
        if not reason:
            layer.packages.mkdir(parents=True)
        self.results[layer.key] = InstallResult(reason, **values)
        return packages.advance()


@pytest.fixture
def installer(monkeypatch):
    return Installer(monkeypatch)


def refusal(customer, requirements="requirements.txt"):
    return customer.refusals(requirements=requirements)["requirements"]


def test_a_job_waits_for_its_packages_and_then_runs_with_them(customer, installer):
    job = customer.job(requirements="requirements.txt")
    assert "Installing the packages" in selectors.waiting_for(selectors.job_for(customer.organization, job.pk))
    dispatch.dispatch_queue()
    job.refresh_from_db()
    assert (job.state, job.attempts.count()) == (JobState.QUEUED, 0)

    for _twice in range(2):  # the second call starts no other installation
        assert packages.advance() == set()
    ((layer, request),) = installer.started
    assert request.requirements == ("einops", "ujson>5")
    assert layer.organization_id == str(customer.organization.pk)
    assert installer.end(size_bytes=7) == {"default"}
    dispatch.dispatch_queue()
    assert run_spec(job.attempts.get()).packages == str(layer.packages)
    assert PackageLayer.objects.get().size_bytes == 7

    # The second run finds them installed, and a change of the file does not touch the first one.
    customer.write("requirements.txt", "# the same\nujson > 5\neinops\n")
    second = customer.job(requirements="./requirements.txt")
    assert not second.awaits_packages
    assert second.packages == Job.objects.get(pk=job.pk).packages
    assert len(installer.started) == 1
    assert not customer.job().packages, "the file is used only if the order names it"


def test_an_exact_rerun_has_the_packages_of_its_job_though_the_file_changed(customer):
    job = customer.job(requirements="requirements.txt")
    customer.write("requirements.txt", "einops\n")
    assert reruns.changes(job) == ["The requirements file requirements.txt has changed."]
    exact, latest = (
        orders.rerun(membership=customer.membership, job=job, changes=changes).job for changes in ({"exact": True}, {})
    )
    assert (exact.packages == job.packages, latest.packages == job.packages) == (True, False)
    (customer.folder / "requirements.txt").unlink()
    again = orders.rerun(membership=customer.membership, job=exact, changes={"exact": True}).job
    assert (again.packages, again.requirements_path) == (job.packages, "requirements.txt")


def test_a_failed_installation_ends_the_job_free_of_charge_with_its_reason(customer, installer):
    before = customer.wallet
    job = customer.job(requirements="requirements.txt")
    packages.advance()
    assert installer.end("Because ujsson was not found …") == set()
    job.refresh_from_db()
    assert (job.state, job.reason) == (JobState.FAILED, EndReason.PACKAGES_FAILED)
    summary = selectors.summary(selectors.job_for(customer.organization, job.pk))
    assert summary["detail"] == "Because ujsson was not found …"
    assert "is free" in summary["sentence"]
    assert Receipt.objects.get(hold=job.order.hold).total_minor == 0
    assert (customer.wallet.posted_minor, customer.wallet.held_minor) == (before.posted_minor, before.held_minor)

    # Another order tries again, since the index may have the package by now. A cancelled job no longer waits, and
    # nothing is installed for it, unless that has begun.
    for installations in (1, 2):
        again = customer.job(requirements="requirements.txt")
        assert again.awaits_packages
        if installations == 2:
            packages.advance()
        orders.cancel_job(membership=customer.membership, job=again)
        packages.advance()
        assert len(installer.started) == installations
    assert installer.end() == set()
    again.refresh_from_db()
    assert (again.state, again.awaits_packages) == (JobState.CANCELLED, False)


def test_an_organization_has_packages_installed_only_so_often_a_day(customer, other, installer, settings):
    settings.PACKAGE_INSTALLATIONS_PER_DAY = 2
    job = customer.job(requirements="requirements.txt")
    packages.advance()
    installer.end("Because ujsson was not found …")
    customer.job(requirements="requirements.txt")  # the second installation, of the same packages
    customer.job(requirements="requirements.txt")  # it waits for the second one
    held = customer.wallet.held_minor
    customer.write("requirements.txt", "einops\n")
    with pytest.raises(QuotaExceeded, match="installed for your organization 2 times in the last 24 hours"):
        customer.job(requirements="requirements.txt")
    assert customer.wallet.held_minor == held
    assert customer.job().packages is None
    other.write("requirements.txt", "einops\n")
    assert other.job(requirements="requirements.txt").awaits_packages
    Job.objects.filter(pk=job.pk).update(queued_at=job.queued_at - timedelta(days=1))
    assert customer.job(requirements="requirements.txt").awaits_packages
    settings.PACKAGE_INSTALLATIONS_PER_DAY = 0
    other.write("requirements.txt", "ujson\n")
    with pytest.raises(QuotaExceeded, match="The administrator does not allow the installation of packages"):
        other.job(requirements="requirements.txt")


def test_a_platform_fault_of_an_installation_is_retried_and_then_ends_the_job(customer, installer, settings):
    settings.PACKAGE_INSTALLATIONS_PER_DAY = 1
    form = customer.form(requirements="requirements.txt")  # a free estimate waits for its packages too
    job = free_estimates.order_free_estimate(membership=customer.membership, data=form).job
    installer.errors.append(OSError("No space left on device"))  # waited for, without a count
    packages.advance()
    for number in range(packages.MAX_FAULTS):
        packages.advance()
        assert len(installer.started) == number + 1
        installer.end("/srv/index does not exist", is_fault=True)
    job.refresh_from_db()
    # The customer does not read what failed on the platform.
    assert (job.state, job.reason, job.detail) == (JobState.FAILED, EndReason.PLATFORM_ERROR, "")
    own = Image.objects.get(pk=job.image_id)
    own.pk, own.organization, own.name = None, customer.organization, "own"
    own.save()
    Job.objects.filter(pk=job.pk).update(image=own)
    with pytest.raises(QuotaExceeded):  # code in a customer's own image could have reported a fault that did not happen
        customer.job(requirements="requirements.txt")
    Job.objects.filter(pk=job.pk).update(image=job.image)
    assert customer.job(requirements="requirements.txt").awaits_packages, "it does not count for the limit"
    packages.advance()
    installer.end("Because ujsson was not found …")
    with pytest.raises(QuotaExceeded):
        customer.job(requirements="requirements.txt")


def test_refusals_are_shown_at_the_field(customer, settings, tmp_path, monkeypatch):
    (customer.folder / "link.txt").symlink_to("/etc/hostname")
    assert "no file at this path" in refusal(customer, requirements="missing.txt")
    for path in ("../requirements.txt", "link.txt"):
        assert refusal(customer, requirements=path)
    monkeypatch.setattr(layers, "installed_versions", lambda _image: {"torch": "2.13.0+cpu"})
    for text, sentence in (
        ("einops\n-e .\n", "Line 2: “-e .” contains an option."), ("\0\1", "not a text file"),
        ("torch==2.1\n", "contains torch 2.13.0+cpu"),
    ):  # fmt: skip
        customer.write("requirements.txt", text)
        assert sentence in refusal(customer)
    customer.write("requirements.txt", "torch>2\n")
    assert customer.quote(requirements="requirements.txt").purchase["requirements"] == "requirements.txt"
    settings.TRAINYARD_CLUSTERS = {"default": cluster_config(tmp_path)}  # without a package index
    assert "reaches no package index" in refusal(customer)


def cluster_config(root, **changes):
    """Return the configuration of a cluster of Kubernetes."""
    data = {
        "volume": {"claim": "trainyard", "root": str(root)},
        "images": {"pytorch": "registry.example.com/pytorch:1"},
    }
    return ClusterConfig.from_data("default", data | changes)


def test_a_cluster_with_an_index_installs_by_a_run_of_its_own(customer, backend, settings, tmp_path, monkeypatch):
    def refuse(_name):
        raise BackendUnavailable

    index = {"url": "https://pypi.example.com/simple", "networks": ["10.20.0.5/32"]}
    settings.TRAINYARD_RUNS_ROOT = tmp_path / "runs"
    backend.root = tmp_path / "runs/.clusters/default"  # where the console expects the runs of a remote cluster
    settings.TRAINYARD_CLUSTERS = {"default": cluster_config(tmp_path, package_index=index)}
    before = customer.wallet
    job = customer.job(requirements="requirements.txt")
    backend.available = False
    assert packages.advance() == set()
    CapacitySnapshot.objects.create(node_spec=job.node_spec)
    for answers, sentence in ((False, "The cluster is not responding."), (True, "Installing the packages")):
        clusters.record_status(name="default", answers=answers)
        assert sentence in selectors.waiting_for(selectors.job_for(customer.organization, job.pk))
    backend.available = True
    for _twice in range(2):
        assert packages.advance() == set()
    (name,) = backend.runs
    spec = backend.runs[name].spec
    assert (spec.builtin_script, spec.nodes) == ("install", 1)
    assert spec.labels == {"organization": customer.organization.slug}
    layer = PackageLayer.objects.get()
    on_disk = Layer(tmp_path / "runs/.clusters/default/.packages", str(customer.organization.pk), layer.key)
    assert (on_disk.folder / "inputs/requirements.txt").read_text() == "einops\nujson>5\n"

    run_folder = backend.run_folder(name)
    (run_folder / "run/site-packages").mkdir(parents=True)
    (run_folder / "run/site-packages/einops.py").write_text("VERSION = 1\n")
    (run_folder / "logs").mkdir()
    (run_folder / "logs/rank-0.log").write_text(" + einops==1\n")
    assert packages.log_of(layer) == " + einops==1\n"
    backend.start(name)
    backend.end(name, Outcome.COMPLETED)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "delete", refuse)  # the packages are in their place, and the next call finishes
        assert packages.advance() == set()
    assert packages.advance() == {"default"}
    assert backend.runs == {}
    layer.refresh_from_db()
    assert (layer.state, layer.log, layer.cluster) == (States.READY, " + einops==1\n", "default")
    assert (on_disk.packages / "einops.py").is_file()
    assert packages.folder_of(Job.objects.get(pk=job.pk)) == str(on_disk.packages)

    # A hostile package's script puts a link in place of the run's folder. It is not followed, and the job is free.
    customer.write("requirements.txt", "hostile\n")
    second = customer.job(requirements="requirements.txt")
    packages.advance()
    (name,) = backend.runs
    (tmp_path / "elsewhere/site-packages").mkdir(parents=True)
    (backend.run_folder(name) / "run").rmdir()
    (backend.run_folder(name) / "run").symlink_to(tmp_path / "elsewhere")
    backend.start(name)
    backend.end(name, Outcome.COMPLETED)
    packages.advance()
    second.refresh_from_db()
    assert (second.state, second.reason) == (JobState.FAILED, EndReason.PACKAGES_FAILED)
    assert (tmp_path / "elsewhere/site-packages").is_dir()
    assert customer.wallet.posted_minor == before.posted_minor


def test_organizations_share_no_layer(customer, other, installer):
    other.write("requirements.txt", "einops\nujson>5\n")
    first, second = (each.job(requirements="requirements.txt") for each in (customer, other))
    assert first.packages != second.packages
    # An organization has one installation at a time, so that others need not wait for it.
    customer.write("requirements.txt", "einops\n")
    customer.job(requirements="requirements.txt")
    for _twice in range(2):
        packages.advance()
        assert {layer.organization_id for layer, _request in installer.started} == {
            str(each.organization.pk) for each in (customer, other)
        }
        assert len(installer.started) == 2


def test_organizations_take_turns_at_the_installer(customer, other, installer, monkeypatch):
    monkeypatch.setattr(packages, "MAX_INSTALLATIONS", 1)
    for buyer, line in ((customer, "einops"), (customer, "ujson"), (other, "einops<2")):
        buyer.write("requirements.txt", line)
        buyer.job(requirements="requirements.txt")
    packages.advance()
    installer.end()
    installer.end()
    order = [layer.organization_id for layer, _request in installer.started]
    assert order == [str(each.organization.pk) for each in (customer, other, customer)]


def test_unused_layers_are_removed_but_none_of_an_open_job(customer, installer, settings):
    job = customer.job(requirements="requirements.txt")
    packages.advance()
    installer.end(size_bytes=100 << 20)
    layer, on_disk = PackageLayer.objects.get(), installer.started[-1][0]
    PackageLayer.objects.update(used_at=layer.used_at - packages.LAYER_RETENTION * 2)
    packages.remove_unused()
    assert on_disk.is_complete

    # A new layer that does not fit evicts none that is in use.
    settings.PACKAGES_MAX_MIB = 50
    customer.write("requirements.txt", "other\n")
    full = customer.job(requirements="requirements.txt")
    packages.advance()
    full.refresh_from_db()
    assert full.reason == EndReason.PACKAGES_FAILED
    assert "100 MiB, the limit is 50 MiB" in full.detail

    orders.cancel_job(membership=customer.membership, job=job)
    packages.remove_unused()
    layer.refresh_from_db()
    assert (layer.state, on_disk.folder.exists()) == (States.REMOVED, False)
    customer.write("requirements.txt", "einops\nujson>5\n")
    assert customer.job(requirements="requirements.txt").awaits_packages


def test_closing_an_organization_removes_its_packages_and_their_logs_and_no_others(customer, other, installer):
    other.write("requirements.txt", "einops\n")
    for buyer in (customer, other):
        job = buyer.job(requirements="requirements.txt")
        packages.advance()
        installer.end(size_bytes=100)
        orders.cancel_job(membership=buyer.membership, job=job)
    mine, others = (layer for layer, _request in installer.started)
    (mine.folder.parent / "cache").mkdir()
    customer.write("requirements.txt", "other\n")
    job = customer.job(requirements="requirements.txt")
    packages.advance()
    orders.cancel_job(membership=customer.membership, job=job)
    PackageLayer.objects.update(log="of the installer")
    organization = customer.organization
    Closure.objects.create(
        organization=organization, requested_by=customer.membership.user, ends_at=timezone.now() - timedelta(days=1)
    )
    assert closure.complete_due() == 0
    assert Closure.objects.get().problem == "Packages are being installed. Wait for the installation to end."
    installer.end("It failed.")
    assert closure.complete_due() == 1
    assert (mine.folder.parent.exists(), others.is_complete) == (False, True)
    rows = PackageLayer.objects.filter(organization=organization).values_list("state", "requirements", "reason", "log")
    assert set(rows) == {(States.REMOVED, "", "", "")}
    assert PackageLayer.objects.get(organization=other.organization).log == "of the installer"


@pytest.mark.django_db(transaction=True)
def test_an_ordered_layer_is_not_installed_while_its_old_folder_is_removed(customer, installer, monkeypatch):
    job = customer.job(requirements="requirements.txt")
    packages.advance()
    installer.end()
    orders.cancel_job(membership=customer.membership, job=job)
    PackageLayer.objects.update(used_at=job.queued_at - packages.LAYER_RETENTION * 2)
    remove_folder = Layer.remove

    def order_and_remove(layer):
        assert customer.job(requirements="requirements.txt").awaits_packages
        together(packages.advance)  # as another process, while this one removes the layer
        assert len(installer.started) == 1
        remove_folder(layer)

    monkeypatch.setattr(Layer, "remove", order_and_remove)
    packages.remove_unused()
    packages.advance()
    assert len(installer.started) == 2


def test_pages_and_api_offer_the_file_and_show_the_log(customer, installer, client):
    client.force_login(customer.membership.user)
    card = client.post("/training/quote/", customer.form(max_time="60")).content.decode()
    assert 'data-set-field="requirements" data-value="requirements.txt"' in card
    card = client.post("/training/quote/", customer.form(requirements="requirements.txt")).content.decode()
    assert "data-set-field" not in card
    customer.write("model/train.py")
    for code_path in ("model/train.py", "../x/train.py"):  # only a file beside the script is offered
        purchase = {"workspace": customer.workspace.name, "code_path": code_path}
        assert packages.unchosen_file(customer.organization, purchase) == ""
    customer.write("requirements.txt", "-e .\n")
    form = customer.form(requirements="requirements.txt", touched="requirements")
    assert "contains an option" in client.post("/training/quote/", form).content.decode()

    customer.write("requirements.txt", "einops\n")
    job = customer.job(requirements="requirements.txt")
    packages.advance()
    folder = installer.started[-1][0].folder
    folder.mkdir(parents=True)
    (folder / "log.txt").write_text("error: <nothing>\n")
    shown = {"state": "pending", "requirements": ["einops"], "reason": "", "size_bytes": 0, "log": "error: <nothing>\n"}
    assert client.get(f"/api/v1/jobs/{job.pk}/packages/").json() == shown
    installer.end("nothing was found")
    ended = client.get(f"/api/v1/jobs/{job.pk}/packages/").json()
    assert ended == shown | {"state": "failed", "reason": "nothing was found"}
    page = client.get(f"/jobs/{job.pk}/").content.decode()
    assert "error: &lt;nothing&gt;" in page
    assert "nothing was found" in page
    assert 'value="requirements.txt"' in client.get(f"/training/new/?rerun={job.pk}").content.decode()
