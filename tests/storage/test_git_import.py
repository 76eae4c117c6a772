"""Workspaces from git repositories: which addresses are read, which files are imported, and workers that die."""

import socket
import subprocess
from itertools import count

import pytest
from django.utils import timezone

from console.accounts.models import User
from console.core.errors import InvalidInput
from storage import catalog, git_import, secret_store, selectors, tasks, workspace_imports
from storage.errors import GitFailed, NameTaken, TooLarge, UnsafePath
from storage.git_import import fetch, git_fill
from storage.models import Allocation, WorkspaceImport
from storage.quota import Reservation
from storage.trees import Usage
from storage.workspace_sources import start_workspace
from tests.crashes import crash_at
from tests.factories.storage import WorkspaceImportFactory
from tests.storage.refusals import refused_fields

pytestmark = pytest.mark.django_db
URL = "https://github.com/name/repository.git"
PUBLIC = "140.82.121.3"
"""A public address, one of GitHub's."""


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository on the disk, which git may read in place of one on the network."""
    folder = tmp_path / "origin"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "train.py").write_text("print(1)")
    (folder / "run.sh").write_text("true")
    (folder / "run.sh").chmod(0o755)
    (folder / ".gitattributes").write_text("* filter=evil\n*.bin filter=lfs\n")  # programs that git must not start
    git(folder, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    git(folder, "tag", "v1")
    (folder / "src" / "train.py").write_text("print(2)")
    git(folder, "commit", "-am", "second")
    monkeypatch.setattr(git_import, "PROTOCOL", "file")
    return folder


@pytest.fixture
def fetched(repository, owner):
    """`fetched(branch, url, name)` creates a workspace from the repository; returns its folder."""

    def create(branch="", url=f"file://{repository}", name="code"):
        options = {"protocol.file.allow": "always"}  # `fetch` itself allows no protocol
        workspace = catalog.create_workspace(
            organization=owner.organization,
            user=None,
            name=name,
            fill=lambda folder, counter: fetch(url=url, branch=branch, options=options, into=folder, counter=counter),
        )
        return selectors.workspace_folder(workspace)

    return create


def test_a_workspace_gets_the_unchanged_files_of_one_commit(fetched, repository, owner):
    folder = fetched()
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    assert names == [".gitattributes", "run.sh", "src", "src/train.py"]
    assert (folder / "src" / "train.py").read_text() == "print(2)"
    assert (folder / "run.sh").stat().st_mode & 0o111
    (workspace,) = selectors.workspaces_for(owner.organization)
    counted = (workspace.size_bytes, workspace.entry_count)
    catalog.measure_workspace(workspace=workspace)
    assert counted == (workspace.size_bytes, workspace.entry_count)
    assert (fetched("v1", name="first") / "src" / "train.py").read_text() == "print(1)"
    # Files that the repository leaves out of archives, or changes in them
    (repository / ".gitattributes").write_text("tests export-ignore\nversion.txt export-subst\n")
    (repository / "tests").mkdir()
    (repository / "tests" / "check.py").write_text("print(3)")
    (repository / "version.txt").write_text("$Format:%H$")
    git(repository, "add", ".")
    git(repository, "commit", "-m", "third")
    folder = fetched(name="third")
    assert (folder / "tests" / "check.py").read_text() == "print(3)"
    assert (folder / "version.txt").read_text() == "$Format:%H$"


def test_hostile_or_missing_repositories_leave_nothing(fetched, repository, owner, monkeypatch):
    with pytest.raises(GitFailed, match="couldn't find remote ref none"):
        fetched("none")
    with pytest.raises(GitFailed):
        fetched(url=f"ext::sh -c touch% {repository}/run")  # such a URL lets git start a program
    (repository / "link").symlink_to("/etc/passwd")
    git(repository, "add", "link")
    git(repository, "commit", "-m", "link")
    with pytest.raises(UnsafePath):
        fetched()
    (repository / "large").write_bytes(bytes(2 * 1024**2))
    git(repository, "rm", "link")
    git(repository, "add", "large")
    git(repository, "commit", "-m", "large")
    monkeypatch.setattr(git_import, "MAX_BYTES", 1024**2)
    with pytest.raises((GitFailed, TooLarge)):  # by the limit of what git writes, or of the unpacked files
        fetched()
    talkative = repository.parent / "git"  # a git whose error output is longer than MAX_BYTES
    talkative.write_text("#!/bin/sh\nexec head -c 2000000 /dev/zero >&2")
    talkative.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(git_import.shutil, "which", lambda _name: str(talkative))
        with pytest.raises(GitFailed):  # by the limit of what git writes: its errors go to a file
            fetched()
    monkeypatch.setattr(git_import, "MAX_SECONDS", 0)
    with pytest.raises(GitFailed, match="too long"):
        fetched()
    assert not selectors.workspaces_for(owner.organization).exists()
    assert list(catalog.scratch().iterdir()) == []
    assert not (repository / "run").exists()


@pytest.fixture
def resolve(monkeypatch):
    """`resolve(*addresses)` gives every host name these addresses. Before the first call it is PUBLIC."""

    def answer(*addresses):
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 443)) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)

    answer(PUBLIC)
    return answer


REFUSED = {
    "git_url": [
        "http://github.com/a/b", "ssh://git@github.com/a/b", "git@github.com:a/b", "file:///etc", "ext::sh",
        "--upload-pack=x", "https://user:token@github.com/a/b", "https://github.com:8443/a/b",
        "https://[::1]/a", "https://github.com.example.com/a", "https://github.com/a b", "https://github.com/a?b=c",
        "https://127.0.0.1/a", "https://github.com:x/a", "https://github.com:0/a/b", "https://",
    ],
    "git_branch": ["-x", "a..b", "a:b", "+a", "a b", "a@{1}", "^a", "a\n"],
}  # fmt: skip


@pytest.mark.parametrize("field", REFUSED)
@pytest.mark.usefixtures("resolve")
def test_only_plain_addresses_of_allowed_hosts_and_plain_branches_are_read(owner, field):
    for value in REFUSED[field]:
        values = {"url": URL} | {field.removeprefix("git_"): value}
        assert refused_fields(git_fill, organization=owner.organization, **values) == [field], value


def test_a_host_with_a_private_address_is_refused(owner, resolve):
    resolve(PUBLIC, "10.0.0.1")
    assert refused_fields(git_fill, organization=owner.organization, url=URL) == ["git_url"]


def test_git_connects_to_the_checked_addresses_and_gets_the_token(owner, stranger, resolve, monkeypatch):
    resolve(PUBLIC, "2606:50c0::1")
    secret_store.save_secret(organization=owner.organization, name="GITHUB", value="of-github\n")
    calls = []
    monkeypatch.setattr(git_import, "fetch", lambda **arguments: calls.append(arguments))
    fill = git_fill(organization=owner.organization, url=URL, secret="GITHUB")
    fill(None, None)  # without the folder and the counter, which only `fetch` needs
    options = calls[0]["options"]
    assert options["http.curloptResolve"] == f"github.com:443:{PUBLIC},[2606:50c0::1]"
    # This is x-access-token:of-github.
    assert options["http.extraHeader"] == "Authorization: Basic eC1hY2Nlc3MtdG9rZW46b2YtZ2l0aHVi"
    with pytest.raises(InvalidInput):
        git_fill(organization=stranger.organization, url=URL, secret="GITHUB")


@pytest.fixture
def client(api, member):
    return api(member)


@pytest.fixture
def imported(repository, resolve, monkeypatch):
    """`imported()` carries out the only open import, from the repository on the disk; returns it."""
    real = git_import.fetch
    local = {"protocol.file.allow": "always"}
    monkeypatch.setattr(
        git_import, "fetch", lambda **values: real(**values | {"url": f"file://{repository}", "options": local})
    )

    def carry_out():
        workspace_imports.import_workspace(WorkspaceImport.objects.get().pk)
        return WorkspaceImport.objects.get()

    return carry_out


def test_a_repository_is_imported_by_a_worker(client, member, imported):
    body = {"name": "code", "git_url": URL}
    with pytest.raises(InvalidInput):  # a template and a repository at once
        start_workspace(organization=member.organization, user=None, template="mnist_ddp", **body)
    started = client.post("/api/v1/workspaces/", body)
    assert (started.status_code, started.json()["state"]) == (202, "waiting")
    assert client.get("/api/v1/workspaces/code/").status_code == 404
    with pytest.raises(NameTaken):
        start_workspace(organization=member.organization, user=None, **body)
    imported()
    done = client.get(started["Location"]).json()
    assert (done["state"], done["workspace"], done["error"]) == ("complete", "code", "")
    assert done["received_bytes"] > 0
    assert client.get("/api/v1/workspaces/code/").status_code == 200


def write_one_file(**values):
    (values["into"] / "train.py").write_text("print(1)")
    values["report"](8)
    return Usage(8, 2)


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("resolve")
def test_a_worker_may_die_before_any_statement_of_an_import(member, monkeypatch):
    monkeypatch.setattr(git_import, "fetch", write_one_file)
    row = start_workspace(organization=member.organization, user=member.user, name="code", git_url=URL)
    for step in count(1):
        died = crash_at(step, lambda: workspace_imports.import_workspace(row.pk))
        row.refresh_from_db()
        created = list(selectors.workspaces_for(member.organization))
        if created:
            assert (row.state, [row.workspace]) == ("complete", created)
            break
        assert row.workspace is None
        assert died
        assert row.ended_at is None
        WorkspaceImport.objects.update(attempts=0)  # otherwise the import ends after three
    assert step > 10, "The worker died too few times."
    assert (selectors.workspace_folder(created[0]) / "train.py").exists()
    workspace_imports.import_workspace(row.pk)
    assert selectors.workspaces_for(member.organization).count() == 1
    assert not Allocation.objects.exists()  # each attempt took over what the one before had reserved


@pytest.mark.usefixtures("resolve")
def test_an_import_that_lost_its_worker_is_repeated_until_it_was_tried_three_times(member, monkeypatch):
    sent = []
    monkeypatch.setattr(tasks, "send", lambda task, *arguments: sent.append(arguments))
    User.objects.filter(pk=member.user_id).update(language="zh-hans")
    row = start_workspace(organization=member.organization, user=member.user, name="code", git_url=URL)
    tasks.resume_imports()
    assert not sent  # a worker may still carry out so young an import
    WorkspaceImport.objects.update(updated_at=timezone.now() - workspace_imports.STALE_AFTER, attempts=3)
    tasks.resume_imports()
    assert sent == [(row.pk,)]
    Reservation(member.organization, label="", key=row.allocation_key).count(entries=1)  # left by the last worker
    workspace_imports.import_workspace(row.pk)
    assert not Allocation.objects.exists()
    row.refresh_from_db()
    assert row.state == "failed"
    assert row.error.startswith("导入中断次数过多")  # in the member's language


@pytest.mark.usefixtures("resolve")
def test_deleted_workspaces_hide_no_failed_import_and_the_number_of_open_ones_is_limited(member, monkeypatch):
    monkeypatch.setattr(workspace_imports, "MAX_OPEN", 1)
    organization, now = member.organization, timezone.now()
    failed = WorkspaceImportFactory(organization=organization, ended_at=now, error="No such branch.")
    WorkspaceImportFactory.create_batch(20, organization=organization, ended_at=now)  # their workspaces were deleted
    still_open = WorkspaceImportFactory(organization=organization)
    assert workspace_imports.shown_imports(organization) == [still_open, failed]
    with pytest.raises(InvalidInput, match="has 1 imports in progress"):
        start_workspace(organization=organization, user=None, name="code", git_url=URL)
