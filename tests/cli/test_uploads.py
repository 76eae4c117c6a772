"""Uploads of the command line that are interrupted and continued, and which files of a folder they contain."""

import io
import os
import tarfile

import httpx
import pytest

from cli import transport, uploads
from cli.errors import CliError
from cli.folders import scan
from cli.ignore import DEFAULTS, Ignore
from cli.uploads import FileContent, TarContent, Uploads
from tests.cli.conftest import client_of


@pytest.fixture
def folder(tmp_path):
    """Files of unusual sizes: none, a block of tar, several; a path longer than tar's 100 characters; and a link."""
    folder = tmp_path / "data"
    (folder / "deep" / ("long-" * 30)).mkdir(parents=True)
    (folder / "empty").write_bytes(b"")
    (folder / "block").write_bytes(b"b" * 512)
    (folder / "deep" / ("long-" * 30) / "ümlaut").write_bytes(bytes(range(256)) * 11)
    (folder / "link").symlink_to("/etc/passwd")
    return folder


class TusServer:
    """A server of the upload protocol tus that breaks the connection at the given offsets."""

    def __init__(self, *cuts):
        self.cuts = sorted(cuts)
        self.received = b""
        self.created = 0
        self.is_gone = False
        self.lost_offsets = 0  # how many requests for the offset fail after each cut
        self.to_lose = 0

    def __call__(self, request):
        if request.method == "POST":
            self.created += 1
            self.received, self.is_gone = b"", False
            return httpx.Response(201, headers={"Location": f"/api/v1/uploads/{self.created}/"})
        if request.method == "HEAD" and self.to_lose:
            self.to_lose -= 1
            raise httpx.ConnectError("down")
        if self.is_gone:
            return httpx.Response(404, json={"code": "not_found", "message": "m"})
        if request.method == "GET":
            fields = {"id": "1", "size_bytes": 1, "offset": 1, "version": 3, "error": None, "state": "complete"}
            return httpx.Response(200, json=fields)
        if request.method == "PATCH":
            if int(request.headers["Upload-Offset"]) != len(self.received):
                return httpx.Response(409, json={"code": "offset_conflict", "message": "m"})
            body = request.read()
            assert len(body) == int(request.headers["Content-Length"])
            if self.cuts and self.cuts[0] <= len(self.received) + len(body):
                self.received += body[: self.cuts.pop(0) - len(self.received)]
                self.to_lose = self.lost_offsets
                raise httpx.WriteError("cut")
            self.received += body
        return httpx.Response(204, headers={"Upload-Offset": str(len(self.received))})


def uploads_to(tus, tmp_path):
    return Uploads(client_of(tus), tmp_path / "state" / "uploads.json", pause=lambda _seconds: None)


def test_a_cut_upload_continues_where_the_server_is(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(uploads, "REQUEST_BYTES", 1000)  # so that there are several requests, each of which may be cut
    content = TarContent(scan(folder))
    tus, sent = TusServer(1, 700, 1500, 1501, 4000), []
    tus.lost_offsets = transport.TRIES + 1  # the console stays away for longer than one request is repeated
    assert uploads_to(tus, tmp_path).send(content, {"purpose": "dataset"}, on_sent=sent.append).version == 3
    assert (tus.created, tus.received) == (1, b"".join(content.read(0)))
    assert sum(sent) == content.size


def test_another_process_continues_an_upload_or_begins_again_if_it_is_gone(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(uploads, "TRIES", 1)
    file = folder / "block"
    tus = TusServer(100)
    with pytest.raises(CliError):
        uploads_to(tus, tmp_path).send(FileContent(file), {})
    uploads_to(tus, tmp_path).send(FileContent(file), {})
    assert (tus.created, tus.received) == (1, file.read_bytes())
    tus.cuts = [600]
    file.write_bytes(b"c" * 700)
    with pytest.raises(CliError):
        uploads_to(tus, tmp_path).send(FileContent(file), {})
    tus.is_gone = True
    uploads_to(tus, tmp_path).send(FileContent(file), {})
    # The second upload began because the file had changed, the third because the console no longer knew the second.
    assert (tus.created, tus.received) == (3, b"c" * 700)


def test_a_folder_is_the_same_archive_from_every_offset(folder):
    content = TarContent(scan(folder))
    whole = b"".join(content.read(0))
    assert len(whole) == content.size
    for offset in range(0, content.size + 1, 171):  # not aligned with the blocks of 512 bytes
        assert b"".join(content.read(offset)) == whole[offset:]
    with tarfile.open(fileobj=io.BytesIO(whole)) as packed:
        members = {member.name: packed.extractfile(member).read() for member in packed}
    assert members == {
        "empty": b"", "block": b"b" * 512, f"deep/{'long-' * 30}/ümlaut": bytes(range(256)) * 11,
    }  # fmt: skip
    assert TarContent(scan(folder)).fingerprint == content.fingerprint


def test_a_file_that_is_deleted_while_its_folder_is_read_is_left_out(folder, monkeypatch):
    monkeypatch.setattr(Ignore, "matches", lambda *_arguments, **_options: (folder / "block").unlink(missing_ok=True))
    assert [file.path for file in scan(folder).files] == [f"deep/{'long-' * 30}/ümlaut", "empty"]


def test_a_file_that_changes_while_it_is_sent_is_an_error(folder):
    content = TarContent(scan(folder))
    (folder / "block").write_bytes(b"b" * 513)
    with pytest.raises(CliError, match="changed"):
        b"".join(content.read(0))
    content = FileContent(folder / "block")
    (folder / "block").write_bytes(b"c" * 513)
    os.utime(folder / "block", (1, 1))
    with pytest.raises(CliError, match="changed"):
        b"".join(content.read(0))


@pytest.mark.parametrize(
    ("patterns", "ignored", "kept"),
    [
        ("*.log", "a.log|deep/a.log", "a.logs|a/log"),
        ("/top", "top", "deep/top"),
        ("deep/x", "deep/x", "a/deep/x"),
        ("**/x", "x|a/x|a/b/x", "ax|a/bx"),
        ("a/**", "a/b|a/b/c", "a|b/a/c"),
        ("a/**/z", "a/z|a/b/z|a/b/c/z", "az|a/bz"),
        ("b?r[0-9]", "bar1|d/bor9", "br1|bar|bara"),
        ("[!a]c", "bc", "ac"),
        ("[^a]c", "bc|^c", "ac"),
        ("a[!x]b", "ayb", "axb|a/b"),
        (r"[]^\]-][a\-z]", "]a|^-|-z", "aa|]b"),
        ("[[:digit:]x][![:alpha:]]", "1_|x9", "a1|:1|1a"),
        ("a**/b", "ab|a/x/b|ax/y/b", "b|xa/b"),
        ("?a**/b", "xa/b|xay/b", "xab|xa/y/b"),
        ("/**\n!/a/b", "x|x/y", "a/b"),
        ("//a", "", "a"),
        ("*\n!keep", "x", "keep"),
        ("# comment\n\n \n\\#x", "#x", "comment"),
        ("a b", "a b", "ab"),
        ("x.y", "x.y", "xzy"),
    ],
)
def test_ignore_rules_are_those_of_git(patterns, ignored, kept):
    rules = Ignore(patterns.split("\n"))
    assert all(rules.matches(path, is_folder=False) for path in filter(None, ignored.split("|")))
    assert not any(rules.matches(path, is_folder=False) for path in kept.split("|"))


def test_a_rule_that_ends_with_a_slash_ignores_folders_only_and_defaults_can_be_undone():
    rules = Ignore([*DEFAULTS, "data/"])
    assert rules.matches("a/data", is_folder=True)
    assert not rules.matches("a/data", is_folder=False)
    for path, is_folder in ((".git", True), ("a/__pycache__", True), (".env", False), ("trainyard-jobs", True)):
        assert rules.matches(path, is_folder=is_folder)
    assert not Ignore([*DEFAULTS, "!.env"]).matches(".env", is_folder=False)
    for malformed in ("[z-a]", "[[:word:]]", "a[b", "a\\"):
        with pytest.raises(CliError):
            Ignore([malformed])
