"""Usage that counts against the storage quota, and how a customer frees it: by page and by API."""

import pytest
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils import timezone
from django.utils.safestring import mark_safe

from jobs import results
from storage import retention, selectors
from storage.models import WorkspaceImport
from tests.factories.storage import DatasetFactory, DatasetVersionFactory, WorkspaceFactory, WorkspaceImportFactory

pytestmark = pytest.mark.django_db
API = "/api/v1/storage/"


@pytest.fixture
def kept(customer, completed_job):
    """A deleted dataset version, a deleted workspace, and a job with results. All count against the quota."""
    folder = customer.backend.run_folder(completed_job.attempts.get().run_name) / "run"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.pt").write_bytes(b"x" * 100)
    results.measure(completed_job)
    version = DatasetVersionFactory(dataset=DatasetFactory(organization=customer.organization, name="digits"))
    workspace = WorkspaceFactory(organization=customer.organization, name="old")
    retention.delete_dataset(dataset=version.dataset)
    retention.delete_workspace(workspace=workspace)
    return [version, workspace, completed_job]


def test_the_page_lists_what_is_kept_removes_and_restores_it(owner_page, customer, kept):
    version, workspace, job = kept
    page = owner_page.get(reverse("storage_usage")).content.decode()
    for text in (str(version), "old", f"#{job.pk} ", "Kept until", "Restore", "Delete permanently"):
        assert text in page
    usage = owner_page.get(API).json()
    assert usage["left_bytes"] == selectors.quota_left(customer.organization)
    assert [each["key"] for each in usage["allocations"]] == [f"job:{job.pk}"]
    before = selectors.storage_used(customer.organization)
    owner_page.post(reverse("storage_remove", args=["versions", version.pk]))
    owner_page.post(reverse("storage_restore", args=["workspaces", workspace.pk]))
    owner_page.post(reverse("storage_remove_results", args=[job.pk]))
    assert selectors.deleted(customer.organization) == []
    assert selectors.workspace_named(customer.organization, "old") == workspace
    assert not selectors.allocations(customer.organization).exists()
    for kind, item in (("versions", version), ("workspaces", workspace)):  # neither is deleted any more
        assert owner_page.delete(f"{API}deleted/{kind}/{item.pk}/").status_code == 404
    assert selectors.storage_used(customer.organization) < before
    owner_page.get(reverse("storage_usage"))  # shows the toasts, which name the version, so that later pages lack them
    assert str(version) not in owner_page.get(reverse("storage_usage")).content.decode()


def test_a_workspace_that_an_open_job_uses_cannot_be_deleted(owner_page, customer):
    job = customer.job()
    page = owner_page.post(reverse("workspace_delete", args=["main"]), follow=True).content.decode()
    assert f"#{job.pk} train.py" in page
    assert "uses this and has not ended." in page
    refused = owner_page.delete("/api/v1/workspaces/main/")
    assert (refused.status_code, refused.json()["code"]) == (409, "in_use")


def test_an_empty_list_shows_text_and_not_html(owner_page):
    assert "at $DATASETS_PATH/mnist." in owner_page.get(reverse("dataset_list")).content.decode()
    shown = render_to_string("components/empty.html", {"icon": "database", "title": mark_safe("<x>"), "text": "a<b>c"})
    assert "&lt;x&gt;" in shown
    assert "a&lt;b&gt;c" in shown


def test_the_editor_shows_the_links_of_a_new_file_once_it_is_saved(owner_page):
    new = owner_page.get(reverse("workspace_file", args=["main", "new.py"]) + "?new=1").content.decode()
    for link in ("train", "download"):
        assert f'id="{link}" hidden' in new
    saved = owner_page.get(reverse("workspace_file", args=["main", "train.py"])).content.decode()
    assert 'id="train" href' in saved


def test_the_list_of_workspaces_shows_imports_until_the_last_has_ended(owner_page, customer):
    row = WorkspaceImportFactory(organization=customer.organization, attempts=1, received_bytes=2048)
    page = owner_page.get(reverse("workspace_list")).content.decode()
    assert "Importing" in page
    assert reverse("workspace_imports") in page
    WorkspaceImport.objects.filter(pk=row.pk).update(error="No such branch.", ended_at=timezone.now())
    fragment = owner_page.get(reverse("workspace_imports"))
    assert (fragment["HX-Refresh"], "No such branch." in fragment.content.decode()) == ("true", True)
