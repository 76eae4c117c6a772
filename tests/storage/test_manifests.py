"""The manifest of a version: the hash of each file, found by its path."""

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from storage import manifests

NAMES = st.sampled_from(["a", "b", "a.b", "a-", "z", "数据", "new\nline", " ", "A"])
PATHS = st.sets(st.lists(NAMES, min_size=1, max_size=4).map(tuple), max_size=12)


def possible_files(paths):
    """Return the paths that can be files together: none is a folder of another one."""
    return [path for path in paths if not any(other[: len(path)] == path and other != path for other in paths)]


@settings(max_examples=30, deadline=None)
@given(paths=PATHS)
def test_each_file_is_found_and_no_other(tmp_path_factory, paths):
    top = tmp_path_factory.mktemp("version")
    folder = top / "files"
    folder.mkdir()
    (folder / "link").symlink_to("a")
    present = {"/".join(path): "/".join(path).encode() for path in possible_files(paths)}
    for path, content in present.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    with manifests.path_of(folder).open("xb") as target:
        manifests.write(folder=folder, target=target)
    with manifests.open_manifest(folder) as manifest:
        for path, content in present.items():
            assert manifest.sha256(path) == hashlib.sha256(content).hexdigest()
        for path in ("link", "missing", "a/missing", "zz", "", *(f"{path}/x" for path in present)):
            assert manifest.sha256(path) == ""


def test_what_is_left_of_a_cut_manifest_is_found():
    lines = [b"%064d  %s" % (number, path) for number, path in enumerate((b"a", b"b", b"cut/file"))]
    for length in range(2, len(lines[2])):
        manifest = manifests.Manifest(b"\0".join([*lines[:2], lines[2][:length]]))
        found = [manifest.sha256(path) for path in ("a", "b", "cut/file", "z")]
        assert found == [f"{0:064}", f"{1:064}", "", ""]
