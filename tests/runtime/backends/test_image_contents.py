"""What an image contains, as read from its virtual environment."""

from runtime.images import venvs
from runtime.images.contents import read_contents


def build(root, *packages, python="version = 3.11.7"):
    """Make the environment of the image `pytorch`, with the metadata of these packages."""
    site = root / "pytorch" / "lib" / "python3.11" / "site-packages"
    for package in packages:
        (site / f"{package}.dist-info").mkdir(parents=True)
    (root / "pytorch" / "pyvenv.cfg").write_text(f"home = /usr/bin\n{python}\n")
    venvs.mark_ready(root / "pytorch", "digest")


def test_the_versions_of_python_cuda_and_packages_are_read(tmp_path):
    assert read_contents(tmp_path, "pytorch") is None
    build(tmp_path, "torch-2.13.0+cu128", "nvidia_cuda_runtime_cu12-12.8.90", "Pillow-12.0.0")
    found = read_contents(tmp_path, "pytorch")
    assert (found.python, found.cuda, found.frameworks) == ("3.11.7", "12.8.90", {"pytorch": "2.13.0+cu128"})
    assert found.packages == {"nvidia-cuda-runtime-cu12": "12.8.90", "pillow": "12.0.0", "torch": "2.13.0+cu128"}
    build(tmp_path, python="version_info = 3.12.1")  # uv's name of this field
    assert read_contents(tmp_path, "pytorch").python == "3.12.1"
