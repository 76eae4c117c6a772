"""Downloads from a console that is not trusted: nothing is written outside of the target folder."""

import ntpath
import posixpath

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cli.downloads import MAX_DEPTH, TRIES, download_file, is_same, job_files, safe_parts, set_modified_time, target_of
from cli.errors import CliError, UnsafePath
from cli.schemas import JobEntry
from tests.cli.conftest import client_of

# In turn: empty parts, "." and ".."; Windows separators, drives and streams; NUL, line breaks and terminal escapes; a
# character that reverses text; endings that Windows removes; one part more than MAX_DEPTH.
UNSAFE = [
    "", "/etc/passwd", "..", "outputs/../../x", "outputs//x", "outputs/.", "a\\..\\b", "C:/x", "C:x", "a\0b", "a\nb",
    "a\x1b[2J", "\u202egnp.exe", "outputs/x ", "outputs/x.", "/".join(["a"] * (MAX_DEPTH + 1)),
]  # fmt: skip


def client_listing(entries_by_folder):
    """Return a client of a console that lists these entries: (path, kind) pairs by folder."""

    def answer(request):
        entries = entries_by_folder[request.url.params.get("path", "")]
        rows = [{"path": path, "kind": kind, "size": 1, "modified_at": None} for path, kind in entries]
        return httpx.Response(200, json={"results": rows, "next": None})

    return client_of(answer)


def test_unsafe_names_are_refused(tmp_path):
    for path in UNSAFE:
        with pytest.raises(UnsafePath):
            target_of(tmp_path / "target", path)
        with pytest.raises(UnsafePath):
            list(job_files(client_listing({"": [(path, "file")]}), 1, ""))


NAMES = st.text(alphabet="./\\:a\0 é", max_size=4) | st.sampled_from(["a", "é", "..", "C:", "..\\.."])


@pytest.mark.parametrize(("paths", "folder"), [(posixpath, "/target"), (ntpath, "C:\\target")])
@given(path=st.lists(NAMES, min_size=1, max_size=4).map("/".join))
@example("a/é")
def test_an_accepted_name_stays_inside_the_folder_on_every_system(paths, folder, path):
    try:
        parts = safe_parts(path)
    except UnsafePath:
        assert path != "a/é"
        return
    target = paths.normpath(paths.join(folder, *parts))
    assert target == paths.sep.join((folder, *parts))


def test_a_listing_names_entries_of_its_own_folder_only():
    for entry in ("outputs/deep/x", "checkpoints/x", "outputsx", "outputs"):
        listed = client_listing({"": [("outputs", "folder")], "outputs": [(entry, "file")]})
        with pytest.raises(UnsafePath):
            list(job_files(listed, 1, "outputs"))


def test_one_file_or_a_folder_is_found():
    listed = client_listing(
        {"": [("outputs", "folder")], "outputs": [("outputs/a", "folder"), ("outputs/b", "file")],
         "outputs/a": [("outputs/a/c", "file")]}
    )  # fmt: skip
    assert [entry.path for entry in job_files(listed, 1, "outputs/b")] == ["outputs/b"]
    assert [entry.path for entry in job_files(listed, 1, "")] == ["outputs/b", "outputs/a/c"]


def test_links_in_the_target_are_not_followed(tmp_path):
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    target.mkdir()
    (target / "outputs").symlink_to(outside)
    (target / "file").symlink_to(outside / "file")
    for path in ("outputs/x", "file"):
        with pytest.raises(UnsafePath):
            target_of(target, path)
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("modified", [None, "", "yesterday", "9999-12-31T00:00:00Z", "0001-01-01T00:00:00+14:00"])
def test_a_file_without_a_usable_time_is_downloaded_again(tmp_path, modified):
    target, entry = tmp_path / "x", JobEntry(path="x", size=1, modified_at=modified, kind="file")
    target.write_bytes(b"1")
    set_modified_time(target, entry)
    assert not is_same(target, entry)


class FileServer:
    """Serves one file with the given ETags in turn; the last is repeated. `ranges` are the offsets that were requested.

    Breaks the connection of each answer after as many bytes as `cuts` says. Answers after the last cut are complete.
    """

    def __init__(self, content, *cuts, etags=("v1",)):
        self.content, self.cuts, self.etags, self.ranges = content, list(cuts), list(etags), []

    def __call__(self, request):
        etag = self.etags.pop(0) if len(self.etags) > 1 else self.etags[0]
        begin = 0
        if "Range" in request.headers and request.headers["If-Range"] == etag:
            begin = int(request.headers["Range"].removeprefix("bytes=").rstrip("-"))
        self.ranges.append(begin)
        content = self.content[begin:]
        cut = self.cuts.pop(0) if self.cuts else None

        def body():
            yield content[:cut]
            if cut is not None:
                raise httpx.ReadError("cut")

        return httpx.Response(206 if begin else 200, content=body(), headers={"ETag": etag})

    def fetch(self, target, *, size):
        entry, shown = JobEntry(path="x", size=size, modified_at=None, kind="file"), []
        received = download_file(
            client_of(self), 1, entry, target, on_received=shown.append, pause=lambda _seconds: None
        )
        assert sum(shown) == received
        return target.read_bytes()


def test_a_download_continues_after_a_cut_and_begins_anew_if_the_file_has_changed(tmp_path):
    for cuts, etags, ranges in (((3, 0, 4), ["v1"], [0, 3, 3, 7]), ((3,), ["v1", "v2"], [0, 0])):
        files = FileServer(b"0123456789", *cuts, etags=etags)
        assert files.fetch(tmp_path / "x", size=10) == b"0123456789"
        assert files.ranges == ranges


@pytest.mark.parametrize(
    ("content", "size", "cuts"),
    [(b"12345", 4, ()), (b"123", 4, ()), (b"1234", 4, [0] * TRIES)],
    ids=["longer than announced", "shorter than announced", "cut at every try"],
)
def test_an_incomplete_download_leaves_the_earlier_file(tmp_path, content, size, cuts):
    target = tmp_path / "x"
    target.write_bytes(b"before")
    with pytest.raises(CliError):
        FileServer(content, *cuts).fetch(target, size=size)
    assert [each.name for each in tmp_path.iterdir()] == ["x"]
    assert target.read_bytes() == b"before"
