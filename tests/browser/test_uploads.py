"""Uploads in a real browser, to the console or to a bucket: paused, and continued at their offset after a reload."""

import random

import pytest
from playwright.sync_api import expect

from storage import direct_uploads, selectors
from storage.models import DatasetVersion, Upload
from tests import seaweedfs
from tests.browser.conftest import in_chinese, log_in, untranslated
from tests.factories.storage import DatasetFactory, WorkspaceFactory
from tests.storage.archives import tar_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.rerun_if_late("it awaits a server and a browser, with limits of seconds"),
    pytest.mark.xdist_group("uploads"),
]
# SLOW lets an upload of 20 MiB last seven seconds, so that there is time to pause it. -1 is no limit.
SLOW = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": 3 * 1024**2}
FAST = {**SLOW, "uploadThroughput": -1}


@pytest.fixture
def page(transactional_db, member, console, strict_window):
    """The browser, logged in as a member."""
    log_in(strict_window.page.context, console, member.user)
    strict_window.page.url_of = lambda path: f"{console}{path}"
    return strict_window.page


@in_chinese
def test_an_upload_is_paused_and_continues_after_a_reload(page, member, tmp_path, strict_window):
    say = strict_window.say
    DatasetFactory(organization=member.organization, name="digits")
    archive = tmp_path / "digits.tar"
    archive.write_bytes(tar_of({"digits.bin": random.Random(3).randbytes(20 * 1024**2)}))
    offsets = []
    page.on(
        "request",
        lambda request: request.method == "PATCH" and offsets.append(int(request.headers["upload-offset"])),
    )
    page.on("dialog", lambda dialog: dialog.accept())
    network = page.context.new_cdp_session(page)
    network.send("Network.enable")
    network.send("Network.emulateNetworkConditions", SLOW)
    page.goto(page.url_of("/datasets/d/digits/"))
    page.locator("[data-pick=files]").set_input_files(archive)
    text = page.locator("[data-upload-text]")
    expect(text).to_contain_text(say("{time} left").replace("{time}", ""))  # the time is a number of seconds
    assert untranslated(page) == []
    page.get_by_role("button", name=say("Pause")).click()
    expect(text).to_contain_text(say("paused"))
    assert untranslated(page) == []
    page.get_by_role("button", name=say("Resume")).click()
    expect(text).to_contain_text(say("{time} left").replace("{time}", ""))
    page.get_by_role("button", name=say("Pause")).click()
    page.reload()
    expect(text).to_contain_text("digits.tar")
    assert untranslated(page) == []
    network.send("Network.emulateNetworkConditions", FAST)
    page.locator("[data-pick=files]").set_input_files(archive)
    expect(page.get_by_role("cell", name=f"v1 {say('latest')}")).to_be_visible()
    assert untranslated(page) == []
    assert DatasetVersion.objects.get().sha256 == Upload.objects.get().sha256
    assert len(offsets) >= 3  # a request at the beginning, one after the pause, and one after the reload
    assert offsets == sorted(offsets)
    assert offsets[-1] > offsets[0] == 0
    expect(text).to_be_hidden()


def test_a_folder_is_uploaded_into_a_workspace_and_a_bad_file_is_refused(page, member, tmp_path, strict_window):
    workspace = WorkspaceFactory(organization=member.organization, name="code")
    DatasetFactory(organization=member.organization, name="digits")
    (tmp_path / "project" / "lib").mkdir(parents=True)
    (tmp_path / "project" / "train.py").write_text("print(1)")
    (tmp_path / "project" / "lib" / "data.py").write_text("DATA = 1")
    page.goto(page.url_of("/workspaces/w/code/"))
    page.locator("[data-pick=folder]").set_input_files(tmp_path / "project")
    expect(page.get_by_role("link", name="train.py")).to_be_visible()
    folder = selectors.workspace_folder(workspace)
    assert (folder / "lib" / "data.py").read_text() == "DATA = 1"
    (tmp_path / "project" / "lib" / "data.py").write_text("DATA = 2")
    for answer, text in (("Cancel", "DATA = 1"), ("Replace", "DATA = 2")):
        page.locator("[data-pick=folder]").set_input_files(tmp_path / "project")
        expect(page.get_by_role("dialog")).to_contain_text("lib/data.py")
        if answer == "Replace":
            with page.expect_navigation():  # the page is loaded again after the upload
                page.get_by_role("button", name=answer).click()
        else:
            page.get_by_role("button", name=answer).click()
            expect(page.get_by_role("dialog")).to_be_hidden()
        assert (folder / "lib" / "data.py").read_text() == text
    (tmp_path / "bad.zip").write_text("no archive")
    strict_window.expected_error_status = 400
    page.goto(page.url_of("/datasets/d/digits/"))
    page.locator("[data-pick=files]").set_input_files(tmp_path / "bad.zip")
    expect(page.get_by_role("alert")).to_contain_text("This archive can't be read")
    page.reload()
    expect(page.locator("[data-upload-text]")).to_be_hidden()


def test_a_large_upload_goes_to_the_bucket_and_continues_after_a_reload(page, member, settings, tmp_path, monkeypatch):
    DatasetFactory(organization=member.organization, name="digits")
    archive = tmp_path / "digits.tar"
    archive.write_bytes(tar_of({"digits.bin": random.Random(3).randbytes(20 * 1024**2)}))
    monkeypatch.setattr(direct_uploads, "MIN_BYTES_IN_PAGES", 10**6)  # 20 MiB are large enough for the bucket
    monkeypatch.setattr(direct_uploads, "PART_BYTES", 5 * 1024**2)
    monkeypatch.setattr(direct_uploads, "send", lambda task: task())  # in place of a worker
    sent = []
    page.on("response", lambda response: response.request.method == "PUT" and sent.append(response.url))
    page.on("dialog", lambda dialog: dialog.accept())
    network = page.context.new_cdp_session(page)
    network.send("Network.enable")
    network.send("Network.emulateNetworkConditions", SLOW)
    with seaweedfs.serving(tmp_path / "seaweedfs") as bucket:
        settings.UPLOAD_BUCKET, settings.UPLOAD_BUCKET_ENDPOINT = bucket.name, bucket.endpoint
        settings.UPLOAD_BUCKET_ACCESS_KEY_ID = bucket.access_key_id
        settings.UPLOAD_BUCKET_SECRET_ACCESS_KEY = bucket.secret_access_key
        directives = settings.CONTENT_SECURITY_POLICY["DIRECTIVES"]
        policy = {"DIRECTIVES": directives | {"connect-src": [*directives["connect-src"], bucket.endpoint]}}
        settings.CONTENT_SECURITY_POLICY = settings.CONTENT_SECURITY_POLICY | policy
        page.goto(page.url_of("/datasets/d/digits/"))
        with page.expect_response(lambda response: response.request.method == "PUT"):
            page.locator("[data-pick=files]").set_input_files(archive)
        text = page.locator("[data-upload-text]")
        page.get_by_role("button", name="Pause").click()
        expect(text).to_contain_text("paused")
        page.get_by_role("button", name="Resume").click()
        expect(text).to_contain_text("left")
        page.get_by_role("button", name="Pause").click()
        page.reload()
        expect(text).to_contain_text("digits.tar is not finished")
        network.send("Network.emulateNetworkConditions", FAST)
        page.locator("[data-pick=files]").set_input_files(archive)
        expect(page.get_by_role("cell", name="v1 latest")).to_be_visible()
        # Only the object of `seaweedfs.serving` is left, and no unfinished multipart upload.
        assert seaweedfs.keys(bucket) == (["ready"], [])
    assert Upload.objects.get().multipart_id
    assert len(sent) == 5  # 20 MiB and the archive's headers in parts of 5 MiB: none is sent twice
    assert all(url.startswith(bucket.endpoint) for url in sent)
    expect(text).to_be_hidden()
