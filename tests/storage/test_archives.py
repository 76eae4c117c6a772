from __future__ import annotations

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
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage import archives, formats
from storage.archives import Unpacked, unpack_archive
from storage.errors import BadArchive, StorageError, TooLarge, UnsafePath
from storage.formats import Format, Limits, sniff
from tests.storage.archives import member, tar_of, tar_with, zip_of

MIB = 1024**2
FILES = {"MNIST/raw/train-images-idx3-ubyte": b"digits" * 1000, "README.md": b"hello", "empty": b""}
PLAIN, GZIPPED, ZIPPED = tar_of(FILES), tar_of(FILES, compressed=True), zip_of(FILES)
EVERY_KIND = pytest.mark.parametrize(
    "make", [tar_of, lambda f: tar_of(f, compressed=True), zip_of], ids=["tar", "gz", "zip"]
)


@pytest.fixture
def target(root: Path) -> Path:
    return root


def unpack(data: bytes, target: Path, max_bytes: int = MIB, max_entries: int = 100) -> Unpacked:
    return unpack_archive(stream=io.BytesIO(data), target=target, limits=Limits(max_bytes, max_entries))


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def outside(target: Path) -> list[str]:
    return sorted(
        str(path.relative_to(target.parent)) for path in target.parent.rglob("*") if target not in path.parents
    )


@EVERY_KIND
def test_unpacks(make: Callable[[dict[str, bytes]], bytes], target: Path) -> None:
    assert unpack(make(FILES), target) == Unpacked(size_bytes=6005, file_count=3)
    assert tree(target) == FILES


@pytest.mark.parametrize(
    ("data", "kind"), [(PLAIN, Format.TAR), (GZIPPED, Format.TAR_GZ), (ZIPPED, Format.ZIP), (zip_of({}), Format.ZIP)]
)
def test_sniff(data: bytes, kind: Format) -> None:
    stream = io.BytesIO(data)
    assert sniff(stream=stream) is kind
    assert stream.tell() == 0


@pytest.mark.parametrize(
    "data",
    [b"", b"x", b"%PDF-1.7" * 100, b"BZh91AY&SY" * 100, b"\xfd7zXZ\x00" * 100, b"\0" * 512, b"Rar!\x1a\x07" * 90],
)
def test_anything_else_is_refused(data: bytes, target: Path) -> None:
    with pytest.raises(BadArchive):
        unpack(data, target)


NAMES = ["../evil", "/evil", "a/../../evil", "..", "a/..", "x" * 300, "/".join(["abcdefghi"] * 500)]


@pytest.mark.parametrize("name", NAMES)
@EVERY_KIND
def test_names_that_lead_out(make: Callable[[dict[str, bytes]], bytes], name: str, target: Path) -> None:
    before = outside(target)
    with pytest.raises(UnsafePath):
        unpack(make({"good": b"x", name: b"evil"}), target)
    assert outside(target) == before


@pytest.mark.parametrize(
    "link", ["/etc/passwd", "../secret.txt", "a/../../secret.txt", "..", "../outside", "a/b/../../../x"]
)
@pytest.mark.parametrize("name", ["link", "./link"])
def test_links_that_lead_out(link: str, name: str, target: Path) -> None:
    with pytest.raises(UnsafePath):
        unpack(tar_with(member("a/b/file"), member(name, tarfile.SYMTYPE, link)), target)
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(info, link)
    (target / "zip").mkdir()
    with pytest.raises(UnsafePath):
        unpack(buffer.getvalue(), target / "zip")


def test_links_that_lead_out_by_way_of_each_other(target: Path) -> None:
    """Each link alone looks harmless: `deep` is inside, and `out` only goes up from where it seems to be."""
    links = [("d/e/deep", ".."), ("deep", "d/e/deep/.."), ("out", "deep/..")]
    with pytest.raises(UnsafePath):
        unpack(tar_with(*(member(name, tarfile.SYMTYPE, link) for name, link in links)), target)


@pytest.mark.parametrize("link", ["loop", "./loop", "other"])
def test_links_in_a_circle(link: str, target: Path) -> None:
    other = member("other", tarfile.SYMTYPE, "loop")
    with pytest.raises(UnsafePath):
        unpack(tar_with(member("loop", tarfile.SYMTYPE, link), other), target)


def test_links_that_stay_inside_are_kept(target: Path) -> None:
    data = tar_with(
        member("latest", tarfile.SYMTYPE, "v1/data"),
        member("v1/data/file"),
        member("v1/up", tarfile.SYMTYPE, "../latest/./file"),
        member("v1/data/copy", tarfile.LNKTYPE, "v1/data/file"),
        content=b"content",
    )
    assert unpack(data, target) == Unpacked(size_bytes=7, file_count=4)
    assert (target / "v1/up").read_bytes() == b"content"
    assert (target / "latest").readlink() == Path("v1/data")
    assert (target / "v1/data/copy").samefile(target / "v1/data/file")


@pytest.mark.parametrize("after", ["link/x", "link"])
@pytest.mark.parametrize("target_of_link", ["../outside", "inside"])
def test_nothing_is_written_through_a_link(after: str, target_of_link: str, target: Path) -> None:
    """The oldest trick: a link first, then a file below it."""
    before = outside(target)
    with pytest.raises((BadArchive, UnsafePath)):
        unpack(tar_with(member("link", tarfile.SYMTYPE, target_of_link), member(after), content=b"evil"), target)
    assert outside(target) == before


@pytest.mark.parametrize("link", ["../secret.txt", "/etc/passwd", "", "missing", "folder", "soft", "soft/x"])
def test_hard_links_to_anything_but_a_file_inside(link: str, target: Path) -> None:
    data = tar_with(
        member("folder", tarfile.DIRTYPE),
        member("soft", tarfile.SYMTYPE, "../secret.txt"),
        member("hard", tarfile.LNKTYPE, link),
    )
    with pytest.raises((BadArchive, UnsafePath)):
        unpack(data, target)
    assert not (target / "hard").exists()


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_devices_and_pipes(kind: bytes, target: Path) -> None:
    with pytest.raises(BadArchive, match="thing"):
        unpack(tar_with(member("thing", kind)), target)
    info = zipfile.ZipInfo("thing")
    info.external_attr = stat.S_IFIFO << 16
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(info, b"")
    with pytest.raises(BadArchive, match="thing"):
        unpack(buffer.getvalue(), target)


def test_owners_and_special_bits_are_dropped(target: Path) -> None:
    tool = member("tool", mode=0o6777)
    tool.uid = tool.gid = 4242
    unpack(tar_with(tool, member("folder", tarfile.DIRTYPE, mode=0o2000), member("folder/data", mode=0)), target)
    assert (target / "tool").stat().st_mode & 0o7777 == 0o755
    assert (target / "tool").stat().st_uid == os.getuid()
    assert (target / "folder").stat().st_mode & 0o7777 == 0o755
    assert (target / "folder/data").stat().st_mode & 0o7777 == 0o644


@pytest.mark.parametrize("second", ["a", "./a", "a/", "a/b", "b//../b/a"])
def test_a_name_twice(second: str, target: Path) -> None:
    with pytest.raises((BadArchive, UnsafePath)):
        unpack(tar_with(member("a"), member(second), content=b"x"), target)


def test_a_folder_may_come_again(target: Path) -> None:
    folder = member("a", tarfile.DIRTYPE)
    assert unpack(tar_with(folder, member("a/b"), folder, member(".", tarfile.DIRTYPE)), target).file_count == 1


@EVERY_KIND
def test_too_many_bytes(make: Callable[[dict[str, bytes]], bytes], target: Path) -> None:
    with pytest.raises(TooLarge):
        unpack(make({"a": b"x" * 600, "b": b"x" * 600}), target, max_bytes=1000)
    assert sum(len(content) for content in tree(target).values()) <= 1000


@EVERY_KIND
def test_too_many_entries(make: Callable[[dict[str, bytes]], bytes], target: Path) -> None:
    with pytest.raises(TooLarge):
        unpack(make({str(number): b"" for number in range(20)}), target, max_entries=10)
    assert len(list(target.iterdir())) <= 10


def test_folders_count_as_entries(target: Path) -> None:
    with pytest.raises(TooLarge):
        unpack(tar_of({"/".join("abcdefghijkl"): b""}), target, max_entries=10)
    with pytest.raises(BadArchive, match="deep"):
        unpack(tar_of({"a/" * 65 + "x": b""}), target, max_entries=1000)


def test_a_bomb_costs_neither_memory_nor_disk(target: Path) -> None:
    bomb = io.BytesIO()
    with gzip.open(bomb, "wb", compresslevel=1) as packed:
        info = tarfile.TarInfo("zeros")
        info.size = 200 * MIB
        packed.write(info.tobuf())
        for _mib in range(200):
            packed.write(bytes(MIB))
    tracemalloc.start()
    with pytest.raises(TooLarge):
        unpack(bomb.getvalue(), target)
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * MIB
    assert tree(target) == {}


def test_a_bomb_of_headers(target: Path) -> None:
    """A long name of a gigabyte, which `tarfile` would read whole."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1024 * MIB
    with pytest.raises(BadArchive):
        unpack(gzip.compress(info.tobuf() + bytes(2 * MIB)), target)
    negative = bytearray(tarfile.TarInfo("x").tobuf())
    negative[124:136] = b"\xff" * 11 + b"\x00"
    negative[148:156] = b"%06o\0 " % tarfile.calc_chksums(bytes(negative))[0]
    with pytest.raises((BadArchive, TooLarge)):
        unpack(bytes(negative) + bytes(1024), target)


def test_a_chain_of_headers_without_end(target: Path) -> None:
    chain = tarfile.TarInfo("x")
    chain.type = tarfile.XHDTYPE
    with pytest.raises(BadArchive):
        unpack(gzip.compress(chain.tobuf() * 5000 + bytes(1024)), target)


def test_a_zip_that_lies_about_its_size(target: Path) -> None:
    data = bytearray(zip_of({"zeros": bytes(5 * MIB)}))
    entry = data.index(b"PK\x01\x02")
    data[entry + 24 : entry + 28] = struct.pack("<L", 10)
    data[22:26] = struct.pack("<L", 10)
    with pytest.raises(BadArchive):
        unpack(bytes(data), target)
    assert sum(len(content) for content in tree(target).values()) <= 10


def test_a_zip_with_an_endless_directory(target: Path) -> None:
    data = bytearray(zip_of({"a": b""}))
    end = data.rindex(b"PK\x05\x06")
    data[end + 12 : end + 16] = struct.pack("<L", formats.ZIP_DIRECTORY_LIMIT + 1)
    with pytest.raises(TooLarge, match=r"tar\.gz"):
        unpack(bytes(data), target)


def test_a_zip_with_a_comment_and_wide_sizes(target: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        with archive.open("a", "w", force_zip64=True) as file:
            file.write(b"content")
        archive.comment = b"a comment" * 100
    assert unpack(buffer.getvalue(), target).size_bytes == 7


def test_a_zip_with_a_password(target: Path) -> None:
    data = bytearray(zip_of({"a": b"content"}))
    entry = data.index(b"PK\x01\x02")
    data[entry + 8] |= 1
    with pytest.raises(BadArchive, match="password"):
        unpack(bytes(data), target)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_of_an_unusual_kind(method: int, target: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("a", b"content")
    with pytest.raises(BadArchive, match="compressed"):
        unpack(buffer.getvalue(), target)


def test_a_sparse_file(target: Path) -> None:
    with pytest.raises(BadArchive):
        unpack(tar_with(member("a", tarfile.GNUTYPE_SPARSE)), target)


def test_too_many_links(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "LINKS_LIMIT", 3)
    data = tar_with(*(member(str(number), tarfile.SYMTYPE, "x") for number in range(4)))
    with pytest.raises(TooLarge, match="links"):
        unpack(data, target)


def test_links_that_take_for_ever_to_follow(target: Path) -> None:
    steps = "./" * 1900 + "x"
    data = tar_with(*(member(f"l{n}", tarfile.SYMTYPE, f"l{n + 1}/.." if n % 2 else steps) for n in range(2000)))
    with pytest.raises(StorageError):
        unpack(data, target, max_entries=10_000)


@pytest.mark.parametrize("data", [PLAIN, GZIPPED, ZIPPED], ids=["tar", "gz", "zip"])
@pytest.mark.parametrize("part", [0.3, 0.6, 0.9, 0.99])
def test_a_truncated_archive(data: bytes, part: float, target: Path) -> None:
    if data is PLAIN:
        end = len(data) - 10240 + 512 * 17  # where the real end is: the rest is padding
        data = data[:end]
    with pytest.raises(BadArchive):
        unpack(data[: int(len(data) * part)], target)


def test_a_tar_cut_between_two_files(target: Path) -> None:
    info = tarfile.TarInfo("a")
    with pytest.raises(BadArchive, match="cut off"):
        unpack(info.tobuf(), target)


def test_a_gzip_whose_sum_is_wrong(target: Path) -> None:
    data = bytearray(GZIPPED)
    data[-8] ^= 1
    with pytest.raises(BadArchive):
        unpack(bytes(data), target)


def test_padding_without_end(target: Path) -> None:
    with pytest.raises(BadArchive):
        unpack(gzip.compress(PLAIN + bytes(20 * MIB), 1), target, max_bytes=100 * MIB)


@pytest.mark.parametrize("content", [PLAIN, ZIPPED, b"text"])
def test_a_gzip_of_something_else(content: bytes, target: Path) -> None:
    data = gzip.compress(content)
    if content is PLAIN:
        assert unpack(data, target).file_count == 3
    else:
        with pytest.raises(BadArchive):
            unpack(data, target)


def test_names_that_are_no_text(target: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT, encoding="latin-1") as archive:
        archive.addfile(tarfile.TarInfo("caf\xe9"))
    with pytest.raises(UnsafePath, match="UTF-8"):
        unpack(buffer.getvalue(), target)
    assert unpack(tar_of({"数据/é": b"x"}), target).file_count == 1
    assert (target / "数据/é").exists()


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.sampled_from([PLAIN[: 512 * 20], GZIPPED, ZIPPED, tar_with(member("l", tarfile.SYMTYPE, "x"))]),
    seed=st.integers(0, 2**32),
    changes=st.integers(1, 12),
)
def test_whatever_is_damaged_it_is_refused_or_unpacked_inside(
    data: bytes, seed: int, changes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("fuzz")
    folder = place / "target"
    folder.mkdir()
    chance = random.Random(seed)
    damaged = bytearray(data)
    for _change in range(changes):
        damaged[chance.randrange(len(damaged))] = chance.choice([0, 1, 0x2E, 0x2F, 0x7F, 0xFF, chance.randrange(256)])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            unpack(bytes(damaged), folder)
    except StorageError:
        pass
    assert [path.name for path in place.iterdir()] == ["target"]
