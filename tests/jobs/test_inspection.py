"""Notebooks that read the files of an ended job: which jobs they may read, under which paths, and for how long."""

import pytest

from console.core.errors import InvalidInput
from jobs import inspection, notebooks, run_specs
from jobs.inspection import NotInspectable
from jobs.models import Attempt, Job
from jobs.packages import FILE_NAME
from jobs.results import is_needed, remove
from jobs.states import EndReason
from runtime.specs import Mount, Outcome
from storage.errors import InUse
from tests.factories.notebooks import notebook_form, sell_notebook

pytestmark = pytest.mark.django_db


@pytest.fixture
def failed(customer) -> Job:
    """A failed job with an output and an empty folder of checkpoints."""
    attempt = customer.started()
    for folder in (customer.backend.output_folder, customer.backend.checkpoint_folder):
        folder(f"job-{attempt.job_id}").mkdir(parents=True)
    (customer.backend.output_folder(f"job-{attempt.job_id}") / "table.csv").write_text("1")
    return customer.end(attempt, Outcome.CODE_FAILED)


def refusal(customer, **changes) -> str:
    """Return the message about `inspected_job` for a notebook that cannot be quoted."""
    with pytest.raises(InvalidInput) as refused:
        notebooks.quote_notebook(membership=customer.membership, data=notebook_form(customer, **changes))
    assert list(refused.value.fields) == ["inspected_job"]
    return str(refused.value.fields["inspected_job"])


def test_a_notebook_mounts_the_jobs_folders_read_only_and_keeps_them_while_it_is_open(customer, failed):
    notebook = sell_notebook(customer, inspected_job=failed.pk)
    key = f"job-{failed.pk}"
    mounts = run_specs.run_spec(notebook).mounts
    assert mounts[-2:] == (
        Mount(str(customer.backend.output_folder(key)), f"/jobs/{failed.pk}/outputs"),
        Mount(str(customer.backend.checkpoint_folder(key)), f"/jobs/{failed.pk}/checkpoints"),
    )
    assert all(mount.read_only for mount in mounts[-2:])
    with pytest.raises(InUse, match="An open notebook reads the files"):
        remove(job=failed, user=None)
    customer.end(notebook, Outcome.COMPLETED)
    assert not is_needed(failed)
    remove(job=failed, user=None)
    assert not any("/jobs/" in mount.target for mount in run_specs.run_spec(Attempt.objects.get(pk=notebook.pk)).mounts)


def test_a_job_that_is_foreign_open_elsewhere_or_without_files_cannot_be_inspected(customer, other, failed):
    assert "does not exist" in refusal(customer, inspected_job=other.ended_with_log().pk)
    assert "has not ended" in refusal(customer, inspected_job=customer.started().job_id)
    with pytest.raises(NotInspectable, match="on another cluster"):
        inspection.find_job(organization=customer.organization, pk=failed.pk, cluster_name="hpc")
    name = failed.attempts.get().backend
    Attempt.objects.filter(job=failed).update(backend="")  # as an attempt of an older version has it
    assert inspection.find_job(organization=customer.organization, pk=failed.pk, cluster_name=name) == failed
    remove(job=failed, user=None)
    assert "has no files" in refusal(customer, inspected_job=failed.pk)


def test_a_notebook_waits_for_the_packages_of_its_requirements(customer):
    customer.write(FILE_NAME, "tqdm\n")
    quote = notebooks.quote_notebook(
        membership=customer.membership, data=notebook_form(customer, requirements=FILE_NAME)
    )
    job = notebooks.place_notebook(membership=customer.membership, quote=quote).job
    assert (job.requirements_path, job.packages.requirements, job.awaits_packages) == (FILE_NAME, "tqdm", True)


def test_the_price_to_look_into_a_failed_job_is_that_of_a_notebook(customer, failed, settings):
    quote = notebooks.quote_notebook(
        membership=customer.membership, data=notebook_form(customer, node_spec=failed.node_spec.name, max_seconds=3600)
    )
    assert notebooks.hourly_price_to_inspect(failed) == quote.ceiling_minor
    assert notebooks.hourly_price_to_inspect(customer.ended_with_log()) is None  # it succeeded
    for change in ({"reason": EndReason.NODE_LOST}, {"reason": failed.reason, "started_at": None}):
        Job.objects.filter(pk=failed.pk).update(**change)  # its code is not at fault, or never started
        assert notebooks.hourly_price_to_inspect(Job.objects.get(pk=failed.pk)) is None
    customer.backend.has_notebooks = False
    assert notebooks.hourly_price_to_inspect(failed) is None
    customer.backend.has_notebooks = True
    settings.NOTEBOOK_URL = ""
    assert notebooks.hourly_price_to_inspect(failed) is None
