"""Installations of packages in sandboxes, with an index of the tests and packages that attack."""

import shutil
import socket
import urllib.request

import pytest

from runtime.files import write_json
from runtime.packages import builder, cluster_builder, layers
from runtime.packages.builder import InstallRequest, InstallResult
from runtime.packages.layers import Layer
from runtime.specs import Failure, Outcome, RunPhase, RunStatus
from tests.console.processes import wait_for
from tests.fakes import FakeBackend
from tests.runtime.conftest import processes_below
from tests.runtime.packages.index import Index, check_alpha

pytestmark = pytest.mark.rerun_if_late("its installations are real runs, with time limits of seconds")


@pytest.fixture
def index(tmp_path):
    """An empty package index, to which each test adds its packages."""
    return Index(tmp_path / "index")


@pytest.fixture
def layer(tmp_path):
    """An empty layer of organization 7."""
    created = Layer(tmp_path / "packages", "7", "a" * 64)
    created.folder.mkdir(parents=True)
    return created


@pytest.fixture
def request_of(index, bare_images):
    """Return a function that creates a request to install requirements from the index on the bare image."""

    def create(*requirements, **changes):
        options = {"indexes": (index.address,), "memory_mib": 2048, "disk_mib": 200, "seconds": 60, **changes}
        return InstallRequest("bare", str(bare_images), requirements, **options)

    return create


@pytest.fixture
def install(layer, request_of):
    """Return a function that installs requirements from the index on the bare image."""
    return lambda *requirements, **changes: builder.install(layer, request_of(*requirements, **changes))


def test_packages_are_installed_once_and_imported_by_runs(layer, index, install, harness, monkeypatch):
    index.add_alpha()
    result = install("alpha")
    assert (result.reason, result.is_fault) == ("", False)
    assert result.size_bytes > 0
    assert "+ alpha==1.0" in builder.log_of(layer)
    assert not (layer.folder / "runs" / "packages").exists()  # the run that installed them is deleted
    check_alpha(harness, layer.packages)
    # A complete layer is not installed again.
    monkeypatch.setattr(builder.LocalBackend, "submit", lambda *_arguments: pytest.fail("installed again"))
    assert install("alpha").size_bytes == result.size_bytes


def test_a_failure_has_uvs_reason_and_leaves_nothing(layer, index, install, bare_images):
    index.add_wheel("alpha", requires=["gamma>1"])
    result = install("alphabet")
    assert "alphabet was not found" in result.reason
    assert not result.is_fault
    assert not layer.is_complete
    # The image's versions stay. What an interrupted installer left in the image does not count.
    index.add_wheel("gamma", "2.0")
    (site_packages,) = (bare_images / "bare" / "lib").glob("python*/site-packages")
    for name in ("gamma-1.0.dist-info", "~amma-0.9.dist-info"):
        (site_packages / name).mkdir()
        (site_packages / name / "METADATA").write_text("Metadata-Version: 2.1\nName: gamma\nVersion: 1.0\n")
    try:
        assert "gamma==1.0" in install("alpha").reason
    finally:
        for name in ("gamma-1.0.dist-info", "~amma-0.9.dist-info"):
            shutil.rmtree(site_packages / name)


def test_a_missing_index_is_the_platforms_fault(install, tmp_path):
    with_password = "https://user:word@index.example/simple"  # refused, since code of packages could read it
    for address in (with_password, f"file://{tmp_path}/nowhere/simple"):
        result = install("alpha", indexes=(address,))
        assert result.is_fault, result


def test_code_of_a_package_is_confined(layer, index, install, tmp_path):
    """The build of a source package reads no other files, and connects to nothing but the index."""
    other = tmp_path / "packages" / "8" / "b"
    other.mkdir(parents=True)
    (other / "secret.txt").write_text("of another organization")
    with socket.create_server(("127.0.0.1", 0)) as private:
        port = private.getsockname()[1]
        index.add_source(
            f"""
            import os, socket, urllib.request
            def attempt(name, action):
                try:
                    print("FINDING", name, "succeeded", action())
                except Exception as error:
                    print("FINDING", name, "failed", error)
            def attack():
                attempt("read", lambda: open({str(other / "secret.txt")!r}).read())
                attempt("list", lambda: os.listdir({str(tmp_path)!r} + "/packages"))
                attempt("environment", lambda: open("/proc/1/environ").read())
                attempt("direct", lambda: socket.create_connection(("127.0.0.1", {port}), 3))
                attempt("proxied", lambda: urllib.request.urlopen("http://127.0.0.1:{port}/", timeout=3).read())
                attempt("metadata", lambda: urllib.request.urlopen("http://169.254.169.254/", timeout=3).read())
                attempt("uv", lambda: open("/datasets/uv/uv", "r+b"))
                attempt("inputs", lambda: open("/datasets/inputs/requirements.txt", "a"))
                raise SystemExit("end of the attack")
            """
        )
        result = install("hostile")
        private.settimeout(0)
        with pytest.raises(BlockingIOError):  # nothing has connected
            private.accept()
    log = builder.log_of(layer)
    assert "end of the attack" in result.reason, log
    findings = [line.split("FINDING ")[1] for line in log.splitlines() if "FINDING" in line]
    assert len(findings) == 8, log
    assert not [finding for finding in findings if "succeeded" in finding], findings
    assert f"Refused a connection to 127.0.0.1:{port}" in log
    assert not layer.is_complete


def test_a_link_in_place_of_the_packages_is_not_mounted(layer, index, install, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    index.add_source(
        """
        import os
        def attack():
            packages = os.environ["RUN_DIR"] + "/site-packages"
            os.mkdir("/workspace/fake")
            os.rename(packages, packages + "-before")
            os.symlink("/workspace/fake", packages)
        """
    )
    result = install("hostile")
    assert result.reason, builder.log_of(layer)
    assert not layer.is_complete
    layer.packages.symlink_to(tmp_path / "elsewhere")
    assert not layer.is_complete


def test_limits_hold_for_code_of_a_package(index, install):
    index.add_source("def attack():\n    kept = [b'x' * (1 << 24) for number in range(1000)]\n")
    assert "memory" in install("hostile", memory_mib=512).reason


def test_an_installation_whose_process_was_killed_starts_over(layer, index, request_of, tmp_path):
    started = tmp_path / "packages" / "7" / "cache" / "started"  # the cache is /workspace in the sandbox
    index.add_source("import signal\ndef attack():\n    open('/workspace/started', 'w').close()\n    signal.pause()\n")
    index.add_wheel("alpha")
    assert builder.last_started_at(layer) == 0
    process = builder.start(layer, request_of("hostile"))
    assert builder.last_started_at(layer) > 0
    wait_for(started.exists, 60)
    assert builder.is_working(layer)
    # While a process installs, a second one ends and changes nothing.
    assert builder.start(layer, request_of("alpha")).wait(120) == 0
    assert builder.result_of(layer) is None
    process.kill()
    process.wait()
    assert not builder.is_working(layer)
    assert builder.result_of(layer) is None
    assert builder.start(layer, request_of("alpha")).wait(120) == 0, (layer.folder / "builder.log").read_text()
    assert builder.result_of(layer).reason == ""
    assert processes_below(layer.folder) == []


def test_an_unexpected_error_of_the_installer_is_a_fault_with_its_cause(layer, monkeypatch, capsys):
    """Without a result, the installation would start again for ever."""
    monkeypatch.setattr("sys.argv", ["builder", str(layer.folder)])
    write_json(layer.folder / "request.json", {"unknown": 1})
    builder.main()
    assert builder.result_of(layer) == InstallResult("The installer failed: KeyError: 'requirements'", is_fault=True)
    assert "Traceback" in capsys.readouterr().err, "for the administrator, in builder.log"


def test_a_layers_key_depends_on_the_image_its_packages_and_the_requirements(tmp_path):
    def make(name, *packages):
        for package in packages:
            (tmp_path / name / "lib" / "python3.11" / "site-packages" / f"{package}.dist-info").mkdir(parents=True)
        image = tmp_path / name
        return {"image": image, "versions": layers.installed_versions(image)}

    torch = make("torch", "torch-2.1+cpu", "Typing_Extensions-4.0")
    assert torch["versions"] == {"torch": "2.1+cpu", "typing-extensions": "4.0"}
    keys = [
        layers.layer_key(**torch, requirements=("einops",)),
        layers.layer_key(**torch, requirements=("einops", "ujson")),
        layers.layer_key(**make("other", "torch-2.1+cpu", "Typing_Extensions-4.0"), requirements=("einops",)),
        layers.layer_key(**make("torch", "numpy-1.0"), requirements=("einops",)),  # one more package in the image
    ]
    assert len(set(keys)) == 4


@pytest.mark.slow
def test_packages_of_pypi_run(install, layer, harness):
    """A pure and a compiled package."""
    address = "https://pypi.org/simple"
    try:
        urllib.request.urlopen(f"{address}/einops/", timeout=20).close()
    except OSError as error:
        pytest.skip(f"PyPI cannot be reached: {error}")
    result = install("einops", "ujson", indexes=(address,))
    assert result.reason == "", builder.log_of(layer)
    harness.complete("import einops, ujson; print(ujson.dumps([einops.__name__]))", packages=str(layer.packages))
    assert '["einops"]' in harness.log()


def test_an_installation_on_a_cluster_that_ended_before_its_start_keeps_its_failure(layer, tmp_path, monkeypatch):
    backend = FakeBackend(root=tmp_path / "runs")
    status = RunStatus(
        "packages", RunPhase.ENDED, submitted_at=0, outcome=Outcome.PLATFORM_ERROR, failure=Failure("No such image.")
    )
    monkeypatch.setattr(backend, "describe", lambda _name: status)
    result, _log = cluster_builder.collect_result(layer, backend)
    assert result == InstallResult("No such image.", is_fault=True)
