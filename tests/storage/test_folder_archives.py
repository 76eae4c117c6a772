"""Archives of folders that customers' code fills: every kind of entry, any name, and changes while they are packed."""

import io
import os
import subprocess
import tarfile
import tracemalloc

import pytest

from storage import files, folder_archives
from storage.folder_archives import LEFT_OUT_NAME, Source

MIB = 1024**2


def pack(root, **options):
    return b"".join(folder_archives.pack([Source(root, "", "outputs", **options)]))


def members(packed):
    """Return the content of each file, and None for each folder. There is nothing else in the archive."""
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        assert all(member.isreg() or member.isdir() for member in tar)
        return {member.name: tar.extractfile(member).read() if member.isreg() else None for member in tar}


def test_a_folder_is_packed_with_all_its_files(root, tmp_path):
    (root / "deep" / "empty").mkdir(parents=True)
    (root / "deep" / "model.pt").write_bytes(b"weights" * MIB)
    (root / "none").touch()
    noise = os.urandom(3 * MIB)
    (root / "noise").write_bytes(noise)  # stored, between parts that are compressed
    odd = os.fsdecode(b"\xff\xfe\n" + "é".encode())
    (root / odd).write_text("odd")
    (root / ("long " * 50)).write_text("long")
    packed = pack(root)
    assert members(packed) == {
        "outputs": None,
        "outputs/deep": None,
        "outputs/deep/empty": None,
        "outputs/deep/model.pt": b"weights" * MIB,
        "outputs/none": b"",
        "outputs/noise": noise,
        f"outputs/{odd}": b"odd",
        "outputs/" + "long " * 50: b"long",
    }
    assert 3 * MIB < len(packed) < 4 * MIB  # the noise, and little for the weights
    subprocess.run(["tar", "-xz", "-C", tmp_path], input=packed, check=True)
    assert (tmp_path / "outputs" / odd).read_text() == "odd"


def test_links_and_pipes_are_left_out(root):
    (root / "link").symlink_to("../secret.txt")
    (root / "folder").symlink_to("../outside")
    os.mkfifo(root / "pipe")
    (root / "own").mkdir()
    assert members(pack(root)) == {"outputs": None, "outputs/own": None}


def test_a_folder_that_becomes_a_link_is_not_followed(root):
    for name in ("first", "second"):
        (root / name).mkdir()
        (root / name / "mine").write_text("mine")
    packing = folder_archives._tar([Source(root, "", "outputs")])
    received = next(packing)  # the header of the top folder
    for name in ("first", "second"):
        (root / name).rename(root.parent / name)
        (root / name).symlink_to("../outside")
    received += b"".join(packing)
    assert b"secret" not in received


@pytest.mark.parametrize("change", ["grows", "shrinks", "disappears"])
def test_a_file_that_changes_meanwhile_does_not_break_the_archive(root, change):
    (root / "log").write_bytes(b"x" * 3 * MIB)
    packing = folder_archives._tar([Source(root, "", "outputs")])
    received = b"".join(next(packing) for _ in range(3))  # two headers, and the first of three chunks
    if change == "disappears":
        (root / "log").unlink()
    else:
        os.truncate(root / "log", 9 * MIB if change == "grows" else MIB + 1)
    received += b"".join(packing)
    result = members(received)
    assert len(result["outputs/log"]) == 3 * MIB
    if change == "shrinks":
        assert result["outputs/log"] == b"x" * (MIB + 1) + bytes(2 * MIB - 1)
        assert b"outputs/log: became shorter" in result[LEFT_OUT_NAME]
    else:
        assert result.keys() == {"outputs", "outputs/log"}


def test_a_large_file_that_is_emptied_after_it_was_opened_does_not_break_the_archive(root, monkeypatch):
    monkeypatch.setattr(folder_archives, "MAX_HOLES_BYTES", 0)
    (root / "log").write_bytes(b"x" * MIB)
    file = files.read(root=root, path="log")
    os.truncate(root / "log", 0)
    left_out = folder_archives._LeftOut()
    assert len(b"".join(folder_archives._file(file, "outputs/log", left_out))) == 512 + MIB
    assert left_out.lines == [f"outputs/log: became shorter while it was read; its last {MIB} bytes are zeros here\n"]


def test_what_cannot_be_packed_is_listed_in_the_archive(root, monkeypatch):
    monkeypatch.setattr(folder_archives, "MAX_DEPTH", 2)
    monkeypatch.setattr(folder_archives, "MAX_HOLES_BYTES", MIB)
    (root / "a" / "b" / "c").mkdir(parents=True)
    with (root / "sparse").open("wb") as file:
        file.truncate(2 * MIB)
    result = members(pack(root))
    assert result.keys() == {"outputs", "outputs/a", "outputs/a/b", LEFT_OUT_NAME}
    assert b"outputs/a/b/c: nested too deep\n" in result[LEFT_OUT_NAME]
    assert b"outputs/sparse: has large holes" in result[LEFT_OUT_NAME]
    monkeypatch.setattr(folder_archives, "MAX_LISTED", 1)
    assert members(pack(root))[LEFT_OUT_NAME].endswith(b"and 1 more\n")


def test_only_chosen_entries_of_a_source_are_packed(root):
    (root / "rank-0.log").write_text("output")
    (root / "node-0.log").write_text("ours")
    result = members(pack(root, is_packed=lambda entry: entry.name.startswith("rank")))
    assert result == {"outputs": None, "outputs/rank-0.log": b"output"}


def test_memory_does_not_grow_with_the_files(root):
    (root / "big").write_bytes(os.urandom(64 * MIB))
    tracemalloc.start()
    try:
        size = sum(len(chunk) for chunk in folder_archives.pack([Source(root, "big", "big")]))
        assert tracemalloc.get_traced_memory()[1] < 32 * MIB  # the threads of tests before this one count too
    finally:
        tracemalloc.stop()
    assert size > 64 * MIB
