"""What a page shows of a file that customers' code wrote."""

import csv

import pytest

from storage import files, previews
from storage.previews import Preview, preview

LONG = csv.field_size_limit() + 1
"""The length of a field that the csv module refuses, so that the file is shown as text."""
TABLE = [
    ("a.csv", b'x,y\r\n1,"a,b"\r\n', Preview(rows=(("x", "y"), ("1", "a,b")))),
    ("a.tsv", b"x\ty\n<b>\t2\n", Preview(rows=(("x", "y"), ("<b>", "2")))),
    ("words.csv", b"one\ntwo\n", Preview(text="one\ntwo\n")),
    ("long.csv", b'x,"' + b"a" * LONG + b'"', Preview(text='x,"' + "a" * LONG + '"')),
    ("a.json", b'{"a":["\xc3\xa9"]}', Preview(text='{\n  "a": [\n    "é"\n  ]\n}')),
    ("broken.json", b"{", Preview(text="{")),
    ("deep.json", b"[" * 9999, Preview(text="[" * 9999)),
    ("page.html", b"<script>alert(1)</script>", Preview(text="<script>alert(1)</script>")),
    ("drawing.svg", b"<svg onload='alert(1)'/>", Preview(text="<svg onload='alert(1)'/>")),
    ("model.pt", b"PK\x03\x04\0\0", Preview()),
    ("latin.txt", b"caf\xe9", Preview()),
    ("a.txt", b"\x89PNG\r\n\x1a\n\0\0", Preview(image_type="image/png")),
    ("a.png", b"<html>", Preview(text="<html>")),
    ("a.jpg", b"\xff\xd8\xff\xe0", Preview(image_type="image/jpeg")),
    ("a.gif", b"GIF89a\0", Preview(image_type="image/gif")),
    ("a.webp", b"RIFF\0\0\0\0WEBPVP8 ", Preview(image_type="image/webp")),
]


def preview_of(root, name, content):
    (root / name).write_bytes(content)
    file = files.read(root=root, path=name)
    with file.stream:
        return preview(file, name=name)


@pytest.mark.parametrize(("name", "content", "expected"), TABLE, ids=[name for name, *_ in TABLE])
def test_the_bytes_of_a_file_decide_what_is_shown(root, name, content, expected):
    assert preview_of(root, name, content) == expected


def test_only_the_beginning_of_a_large_file_is_shown(root, monkeypatch):
    monkeypatch.setattr(previews, "TEXT_BYTES", 10)
    assert preview_of(root, "a.txt", "123456789é".encode()) == Preview(text="123456789", is_complete=False)
    assert preview_of(root, "a.csv", b"a,b\n1,2\n3,4\n") == Preview(rows=(("a", "b"), ("1", "2")), is_complete=False)
    assert preview_of(root, "a.json", b'{"a":     1}') == Preview(text='{"a":     ', is_complete=False)
    monkeypatch.setattr(previews, "IMAGE_BYTES", 8)
    assert preview_of(root, "a.png", b"\x89PNG\r\n\x1a\n\0") == Preview()
    monkeypatch.undo()
    wide = preview_of(root, "a.csv", (",".join("x" * 60) + "\n").encode() * 300)
    # At most 200 rows of 50 columns are shown.
    assert (len(wide.rows), {len(row) for row in wide.rows}, wide.is_complete) == (200, {50}, False)


def test_indentation_of_json_is_bounded(root):
    nested = preview_of(root, "a.json", b"[" * 300 + b"1," * 50_000 + b"1" + b"]" * 300)
    assert not nested.is_complete
    assert len(nested.text or "") <= 4 * previews.TEXT_BYTES


def test_lines_are_counted(root, monkeypatch):
    for content, lines in ((b"", 0), (b"a", 1), (b"a\n", 1), (b"a\nb", 2), (b"\n\n", 2)):
        (root / "a.txt").write_bytes(content)
        file = files.read(root=root, path="a.txt")
        with file.stream:
            assert previews.line_count(file) == lines
    monkeypatch.setattr(previews, "COUNTED_BYTES", 1)
    assert previews.line_count(file) is None
