"""Unpacking uploaded archives: nothing is written outside the target; sizes, numbers and depths are limited."""

import gzip
import io
import os
import random
import stat
import struct
import tarfile
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage import archive_readers, archives
from storage.archive_readers import ArchiveLimits
from storage.archives import FolderTotals, unpack_archive
from storage.errors import BadArchive, StorageError, TooLarge, UnsafePath
from storage.trees import Usage, measure
from tests.storage.archives import member, tar_of, tar_with, zip_of

MIB = 1024**2
FILES = {"MNIST/raw/train-images-idx3-ubyte": b"digits" * 1000, "README.md": b"hello", "empty": b""}
PLAIN, GZIPPED, ZIPPED = tar_of(FILES), tar_of(FILES, compressed=True), zip_of(FILES)
EVERY_KIND = pytest.mark.parametrize(
    "make", [tar_of, lambda files: tar_of(files, compressed=True), zip_of], ids=["tar", "gz", "zip"]
)
REFUSED = (BadArchive, UnsafePath)
"""The errors for hostile members. Which of the two it is does not matter."""


@pytest.fixture
def target(root):
    """The folder to unpack into. Secrets lie beside it."""
    return root


def unpack(data, target, max_bytes=MIB, max_entries=100):
    return unpack_archive(stream=io.BytesIO(data), target=target, limits=ArchiveLimits(max_bytes, max_entries))


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def outside(target):
    """Return the paths beside the target."""
    paths = (path for path in target.parent.rglob("*") if target not in path.parents)
    return sorted(str(path.relative_to(target.parent)) for path in paths)


def zip_with(name, mode, content=b""):
    """A zip of one entry with a Unix mode."""
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(info, content)
    return buffer.getvalue()


def patched(data, *changes):
    """The bytes with `(position, bytes)` changes."""
    changed = bytearray(data)
    for position, new in changes:
        changed[position : position + len(new)] = new
    return bytes(changed)


@EVERY_KIND
def test_unpacks(make, target):
    # The entries are three files, MNIST, MNIST/raw and the target itself.
    assert unpack(make(FILES), target) == FolderTotals(size_bytes=6005, file_count=3, entry_count=6)
    assert tree(target) == FILES


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "a/..", "x" * 300, "abcdefghi/" * 500])
@EVERY_KIND
def test_names_outside_the_target_or_too_long_are_refused(make, name, target):
    before = outside(target)
    with pytest.raises(UnsafePath):
        unpack(make({"good": b"x", name: b"evil"}), target)
    assert outside(target) == before


def link(name, to):
    return member(name, tarfile.SYMTYPE, to)


def hard(to):
    """A hard link with the name `hard`."""
    return member("hard", tarfile.LNKTYPE, to)


HOSTILE = {
    "a link to the root": [link("link", "/etc/passwd")],
    "a link to the parent": [link("./link", "..")],
    "a link outside": [link("link", "../secret.txt")],
    "a link outside by way of a folder": [member("a/b/file"), link("link", "a/b/../../../x")],
    "links that lead outside together": [link("d/e/deep", ".."), link("deep", "d/e/deep/.."), link("out", "deep/..")],
    "a loop of two": [link("loop", "other"), link("other", "loop")],
    "a file below a link": [link("link", "../outside"), member("link/x")],
    "a file below a link that stays inside": [link("link", "inside"), member("link/x")],
    "a file in place of a link": [link("link", "../outside"), member("link")],
    "a hard link outside": [hard("../secret.txt")],
    "a hard link to nothing": [hard("")],
    "a hard link to a missing file": [hard("missing")],
    "a hard link to a folder": [member("folder", tarfile.DIRTYPE), hard("folder")],
    "a hard link to a link": [link("soft", "../secret.txt"), hard("soft")],
    "a hard link below a link": [link("soft", "inside"), hard("soft/x")],
    "a name twice, once with a dot": [member("a"), member("./a")],
    "a name twice, once as a folder": [member("a"), member("a/")],
    "a file and a folder of one name": [member("a"), member("a/b")],
    "a name twice, once by a detour": [member("a"), member("b//../a")],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_members_are_refused_and_nothing_outside_is_touched(name, target):
    before = outside(target)
    with pytest.raises(REFUSED):
        unpack(tar_with(*HOSTILE[name], content=b"evil"), target)
    assert outside(target) == before
    assert not (target / "hard").exists()


@pytest.mark.parametrize("to", ["/etc/passwd", "a/../../secret.txt"])
def test_a_link_outside_in_a_zip_is_refused(to, target):
    with pytest.raises(UnsafePath):
        unpack(zip_with("./link", stat.S_IFLNK | 0o777, to), target)


def test_links_that_stay_inside_are_kept(target):
    data = tar_with(
        member("latest", tarfile.SYMTYPE, "v1/data"),
        member("v1/data/file"),
        member("v1/up", tarfile.SYMTYPE, "../latest/./file"),
        member("v1/data/copy", tarfile.LNKTYPE, "v1/data/file"),
        member("dangling", tarfile.SYMTYPE, "v1/missing"),
        content=b"content",
    )
    assert unpack(data, target) == FolderTotals(size_bytes=7, file_count=5, entry_count=8)  # links count as files
    assert (target / "v1/up").read_bytes() == b"content"
    assert (target / "latest").readlink() == Path("v1/data")
    assert (target / "v1/data/copy").samefile(target / "v1/data/file")


def test_owners_and_special_bits_are_dropped(target):
    tool = member("tool", mode=0o6777)
    tool.uid = tool.gid = 4242
    unpack(tar_with(tool, member("folder", tarfile.DIRTYPE, mode=0o2000), member("folder/data", mode=0)), target)
    modes = [(target / name).stat().st_mode & 0o7777 for name in ("tool", "folder", "folder/data")]
    assert modes == [0o755, 0o755, 0o644]  # of its mode, a file keeps only whether it is executable
    assert (target / "tool").stat().st_uid == os.getuid()


def test_a_folder_that_is_named_several_times_is_counted_once_and_its_headers_are_limited(target):
    folders = [member(name, tarfile.DIRTYPE, mode=0o755) for name in (".", "a", "a/b", "a")]
    unpacked = unpack(tar_with(*folders, member("a/b/file"), member("c/file"), content=b"x"), target)
    assert unpacked == FolderTotals(size_bytes=2, file_count=2, entry_count=6)
    assert measure(root=target).usage == Usage(2, 6)
    with pytest.raises(TooLarge):
        unpack(tar_with(*[folders[1]] * 11), target, max_entries=10)


@EVERY_KIND
def test_bytes_and_entries_are_limited(make, target):
    with pytest.raises(TooLarge):
        unpack(make({"a": b"x" * 600, "b": b"x" * 600}), target, max_bytes=1000)
    assert sum(len(content) for content in tree(target).values()) <= 1000
    (target / "many").mkdir()
    with pytest.raises(TooLarge):
        unpack(make({str(number): b"" for number in range(20)}), target / "many", max_entries=10)
    assert len(list((target / "many").iterdir())) <= 10


def test_folders_count_as_entries_and_their_depth_is_limited(target):
    with pytest.raises(TooLarge):
        unpack(tar_of({"/".join("abcdefghijkl"): b""}), target, max_entries=10)
    with pytest.raises(BadArchive, match="deep"):
        unpack(tar_of({"a/" * 65 + "x": b""}), target, max_entries=1000)  # 64 levels are allowed


def test_a_decompression_bomb_is_stopped_early(target):
    bomb = io.BytesIO()
    with gzip.open(bomb, "wb", compresslevel=1) as packed:
        info = tarfile.TarInfo("zeros")
        info.size = 64 * MIB
        packed.write(info.tobuf())
        for _mib in range(64):
            packed.write(bytes(MIB))
    tracemalloc.start()
    with pytest.raises(TooLarge):
        unpack(bomb.getvalue(), target)
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * MIB
    assert tree(target) == {}


def header(kind, size=0):
    """The header of a tar's member, without its content."""
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, size
    return info.tobuf()


def negative_size():
    """A tar with a negative number in the header's field of the size, and a right checksum."""
    negative = patched(tarfile.TarInfo("x").tobuf(), (124, b"\xff" * 11 + b"\x00"))
    return patched(negative, (148, b"%06o\0 " % tarfile.calc_chksums(negative)[0])) + bytes(1024)


def zip_of_false_size():
    """A zip whose two headers claim ten bytes for a file of 5 MiB."""
    data = zip_of({"zeros": bytes(5 * MIB)})
    return patched(data, (data.index(b"PK\x01\x02") + 24, struct.pack("<L", 10)), (22, struct.pack("<L", 10)))


def zip_of_huge_directory():
    """A zip whose end record claims a directory larger than the limit, and which is long enough to have it."""
    data, size = zip_of({"a": b""}), archive_readers.ZIP_DIRECTORY_LIMIT + 1
    directory = data.index(b"PK\x01\x02")
    data = data[:directory] + bytes(size) + data[directory:]
    return patched(data, (data.rindex(b"PK\x05\x06") + 12, struct.pack("<L", size)))


def zip_with_password():
    """A zip with the flag of encryption."""
    data = zip_of({"a": b"content"})
    return patched(data, (data.index(b"PK\x01\x02") + 8, b"\x01"))


def zip_compressed_by_lzma():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a", b"content")
    return buffer.getvalue()


TAR_END = 17 * 512  # the blocks of PLAIN's members and one block of zeros; the other zeros are padding
MALFORMED = {
    "nothing": (b"", BadArchive, None),
    "PDF": (b"%PDF-1.7" * 100, BadArchive, None),
    "zeros": (b"\0" * 512, BadArchive, None),
    "a gzip of text": (gzip.compress(b"text"), BadArchive, None),
    "a gzip of a zip": (gzip.compress(ZIPPED), BadArchive, None),
    "a gzip with a wrong checksum": (patched(GZIPPED, (len(GZIPPED) - 8, bytes([GZIPPED[-8] ^ 1]))), BadArchive, None),
    "a tar cut between two files": (header(tarfile.REGTYPE), BadArchive, "incomplete"),
    "a tar whose name has a gigabyte": (
        gzip.compress(header(tarfile.GNUTYPE_LONGNAME, 1024 * MIB) + bytes(2 * MIB)), BadArchive, None),
    "a tar with an endless chain of headers": (
        gzip.compress(header(tarfile.XHDTYPE) * 5000 + bytes(1024)), BadArchive, None),
    # BadArchive if the tarfile of this Python refuses the header itself.
    "a tar with a negative size": (negative_size(), (BadArchive, TooLarge), None),
    "a sparse file": (tar_with(member("a", tarfile.GNUTYPE_SPARSE)), BadArchive, None),
    "a block device": (tar_with(member("thing", tarfile.BLKTYPE)), BadArchive, "thing"),
    "a pipe": (tar_with(member("thing", tarfile.FIFOTYPE)), BadArchive, "thing"),
    "a pipe in a zip": (zip_with("thing", stat.S_IFIFO), BadArchive, "thing"),
    "a zip with a false size": (zip_of_false_size(), BadArchive, None),
    "a zip with a huge directory": (zip_of_huge_directory(), TooLarge, r"tar\.gz"),
    "a zip with a password": (zip_with_password(), BadArchive, "password"),
    "a zip compressed by LZMA": (zip_compressed_by_lzma(), BadArchive, "unsupported compression"),
} | {
    f"a {kind} cut at {part}": (data[: int(len(data) * part)], BadArchive, None)
    for kind, data in (("tar", PLAIN[:TAR_END]), ("gzip", GZIPPED), ("zip", ZIPPED))
    for part in (0.3, 0.99)
}  # fmt: skip
"""Bytes, the error that they cause, and a pattern of its message."""


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_archives_are_refused(name, target):
    data, error, match = MALFORMED[name]
    with pytest.raises(error, match=match):
        unpack(data, target)
    assert sum(len(content) for content in tree(target).values()) <= 6005  # the bytes of FILES


def test_endless_padding_is_refused(target):
    with pytest.raises(BadArchive):  # 16 MiB may follow the end of a tar; the limit of bytes is not reached
        unpack(gzip.compress(PLAIN + bytes(20 * MIB), 1), target, max_bytes=100 * MIB)


def test_a_zip64_with_a_comment_unpacks(target):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        with archive.open("a", "w", force_zip64=True) as file:
            file.write(b"content")
        archive.comment = b"a comment" * 100
    assert unpack(buffer.getvalue(), target).size_bytes == 7


def test_links_are_limited_in_number_and_in_steps(target, monkeypatch):
    """2000 links, of which every other has a target of 1900 steps, are refused before the resolution takes minutes."""
    steps = "./" * 1900 + "x"
    data = tar_with(*(member(f"l{n}", tarfile.SYMTYPE, f"l{n + 1}/.." if n % 2 else steps) for n in range(2000)))
    with pytest.raises(StorageError):
        unpack(data, target, max_entries=10_000)
    monkeypatch.setattr(archives, "LINK_COUNT_LIMIT", 3)
    with pytest.raises(TooLarge, match="links"):
        unpack(tar_with(*(member(str(number), tarfile.SYMTYPE, "x") for number in range(4))), target)


def test_names_must_be_utf8(target):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT, encoding="latin-1") as archive:
        archive.addfile(tarfile.TarInfo("caf\xe9"))
    with pytest.raises(UnsafePath, match="UTF-8"):
        unpack(buffer.getvalue(), target)
    assert unpack(tar_of({"数据/é": b"x"}), target).file_count == 1
    assert (target / "数据/é").exists()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.sampled_from([PLAIN, GZIPPED, ZIPPED, tar_with(member("l", tarfile.SYMTYPE, "x"))]),
    seed=st.integers(0, 2**32),
    changes=st.integers(1, 12),
)
def test_a_damaged_archive_is_refused_or_unpacked_inside(data, seed, changes, tmp_path_factory):
    place = tmp_path_factory.mktemp("fuzz")
    folder = place / "target"
    folder.mkdir()
    chance = random.Random(seed)
    damaged = bytearray(data)
    for _change in range(changes):
        # A dot (0x2E) and a slash (0x2F) change where a name leads.
        damaged[chance.randrange(len(damaged))] = chance.choice([0, 1, 0x2E, 0x2F, 0x7F, 0xFF, chance.randrange(256)])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            unpack(bytes(damaged), folder)
    except StorageError:
        pass
    assert [path.name for path in place.iterdir()] == ["target"]
