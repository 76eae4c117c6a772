"""A package index in a folder, with packages that the tests write."""

import functools
import http.server
import io
import socketserver
import tarfile
import textwrap
import zipfile

from tests.http_server import serving

BACKEND = """
import zipfile

def get_requires_for_build_wheel(settings=None):
    return []

def build_wheel(folder, settings=None, metadata=None):
    attack()
    name = "hostile-1.0-py3-none-any.whl"
    with zipfile.ZipFile(folder + "/" + name, "w") as wheel:
        wheel.writestr("hostile.py", "")
        wheel.writestr("hostile-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: hostile\\nVersion: 1.0\\n")
        tags = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
        wheel.writestr("hostile-1.0.dist-info/WHEEL", tags)
        wheel.writestr("hostile-1.0.dist-info/RECORD", "")
    return name
"""
"""The build backend of the package `hostile`. The function `attack` is added by the test."""

USES_ALPHA = """
    import subprocess, sys
    import alpha, beta
    print(alpha.VERSION, beta.VERSION, alpha.__file__, sys.from_pth)
    print(subprocess.run(["alpha-run"], capture_output=True, text=True, check=True).stdout)
    subprocess.run([sys.executable, "-c", "import alpha"], check=True)
    try:
        open(alpha.__file__, "a")
    except OSError as error:
        print(error.strerror)
"""
"""A script that uses all that `Index.add_alpha` publishes, also from a child process, and tries to change it."""


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_arguments):
        """Say nothing; clients of a Unix socket have no address."""


class Index:
    """An index below a folder: its pages in `simple`, its files beside them."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "simple").mkdir(parents=True)
        (folder / "files").mkdir()

    def served(self, path):
        """Return a context manager that serves the index over HTTP on the Unix socket `path`."""
        handler = functools.partial(_Handler, directory=str(self.folder))
        server = socketserver.ThreadingUnixStreamServer(str(path), handler)
        server.daemon_threads = True
        return serving(server)

    @property
    def address(self):
        """The index's address."""
        return f"file://{self.folder}/simple"

    def add_wheel(self, name, version="1.0", *, requires=(), script=False, pth=""):
        """Publish a pure package with one module, and perhaps a console script and a .pth file of its name."""
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
        info = f"{name}-{version}.dist-info"
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as wheel:
            wheel.writestr(f"{name}.py", f"VERSION = {version!r}\n\ndef main():\n    print('script of', VERSION)\n")
            wheel.writestr(
                f"{info}/METADATA", "\n".join([*lines, *(f"Requires-Dist: {each}" for each in requires), ""])
            )
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            if script:
                wheel.writestr(f"{info}/entry_points.txt", f"[console_scripts]\n{name}-run = {name}:main\n")
            if pth:
                wheel.writestr(f"{name}.pth", pth)
            wheel.writestr(f"{info}/RECORD", "")
        self._add_file(name, f"{name}-{version}-py3-none-any.whl", buffer.getvalue())

    def add_alpha(self):
        """Publish `alpha`, which needs `beta`, has a console script, and runs code when an interpreter starts."""
        self.add_wheel("alpha", requires=["beta>1"], script=True, pth="import sys; sys.from_pth = True\n")
        self.add_wheel("beta", "2.0")

    def add_source(self, attack):
        """Publish `hostile`, a source package whose build calls the function `attack` of this source."""
        files = {
            "PKG-INFO": "Metadata-Version: 2.1\nName: hostile\nVersion: 1.0\n",
            "pyproject.toml": '[project]\nname = "hostile"\nversion = "1.0"\n'
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
            "backend.py": BACKEND + textwrap.dedent(attack),
        }
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for path, text in files.items():
                member = tarfile.TarInfo(f"hostile-1.0/{path}")
                member.size = len(text.encode())
                archive.addfile(member, io.BytesIO(text.encode()))
        self._add_file("hostile", "hostile-1.0.tar.gz", buffer.getvalue())

    def _add_file(self, name, file_name, data):
        (self.folder / "files" / file_name).write_bytes(data)
        page = self.folder / "simple" / name
        page.mkdir(exist_ok=True)
        with (page / "index.html").open("a") as file:
            file.write(f'<a href="../../files/{file_name}">{file_name}</a>\n')


def check_alpha(harness, packages):
    """Check that a run uses `alpha`, which is installed in the folder `packages`, and cannot change it."""
    harness.complete(USES_ALPHA, packages=str(packages))
    log = harness.log()
    assert "1.0 2.0 /opt/trainyard/site-packages/alpha.py True" in log
    assert "script of 1.0" in log
    assert "Read-only file system" in log
