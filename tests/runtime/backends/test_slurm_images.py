"""Runs in customers' own images on a real Slurm: skopeo and umoci import them from a real registry."""

import asyncio
import gzip
import re
import socket
import sys
import tarfile
from pathlib import Path

import pytest

from runtime.backends.slurm import check, image_import
from runtime.backends.slurm.commands import Slurm
from runtime.specs import FailureCode, Image, Outcome, PullSecret, RunPhase, WaitingCode
from tests.registry import PASSWORD, USER, file, layer, special
from tests.runtime.backends.contract import MEET, WAIT
from tests.runtime.backends.test_shells import output_of
from tests.slurm.cluster import free_ports

pytestmark = [
    pytest.mark.rerun_if_late("its runs are real processes, which a controller starts after a second or more"),
    pytest.mark.slow,
]
ORGANIZATION = {"organization": "acme", "job": "1"}


@pytest.fixture
def own_image(container_harness, registry, python_layer, request):
    """Return a function that pushes an image and returns the changes of a spec that runs in it.

    The image has the layer `base` (by default the one with Python), a second layer with the entries `extra`, and the
    variables `env`. An image whose import must fail needs no Python, so its `base` is smaller.
    """

    def push(extra=(), env=("PATH=/usr/local/bin:/usr/bin",), base=None):
        name = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")
        layers = [python_layer if base is None else base, *([layer(list(extra))] if extra else [])]
        digest = registry.push(name, "1", layers, Env=list(env))
        return {
            "image": Image(reference=f"{registry.host}/{name}:1", digest=digest),
            "pull_secret": PullSecret(registry.host, USER, PASSWORD),
            "labels": ORGANIZATION,
        }

    return push


def stored(harness):
    """Return the folders of unpacked images."""
    return sorted((harness.folder / "runs" / ".images").glob("*/*/root-*"))


def test_an_organizations_nodes_and_later_runs_share_one_import_that_others_do_not_get(container_harness, own_image):
    # The image sets RANK and not HOME: the platform's values of both count.
    source = """
    import os, sys
    print(sys.executable, os.environ["FLAVOUR"], os.path.exists("/vendor.txt"), os.environ["RANK"], os.environ["HOME"])
    """
    shell = file("usr/bin/sh", Path("/bin/sh").read_bytes(), mode=0o755)
    entries = [file("vendor.txt", b"ours"), shell, special("bin", tarfile.SYMTYPE, "usr/bin")]
    changes = own_image(entries, env=["PATH=/usr/local/bin:/bin", "FLAVOUR=salted", "RANK=9"])
    container_harness.complete(source + MEET, nodes=2, **changes)
    for rank in range(2):
        assert container_harness.log(rank) == f"/usr/local/bin/python3 salted True {rank} /tmp\ntotal 3\n"
    folder = container_harness.folder / "runs"
    (root,) = stored(container_harness)
    assert list((folder / ".images" / ".work").iterdir()) == []
    leaked = [path for path in folder.rglob("*") if path.is_file() and PASSWORD.encode() in path.read_bytes()]
    assert leaked == []
    # The next run needs no registry, which would refuse this password. A shell opens in it.
    host = changes["pull_secret"].host
    container_harness.start(WAIT, name="job-2-1", **{**changes, "pull_secret": PullSecret(host, USER, "expired")})
    address = container_harness.new_backend().shell_socket("job-2-1", 0)
    assert asyncio.run(output_of(address, b"echo rank=$RANK.\n", b"rank=0."))
    # Another organization without a password must pull the image itself, and may not.
    changes |= {"labels": {"organization": "rival", "job": "3"}, "pull_secret": None}
    container_harness.submit("print('theirs')", name="job-3-1", **changes)
    assert container_harness.wait_for_failure(Outcome.CODE_FAILED, "job-3-1").code is FailureCode.IMAGE_CREDENTIALS
    assert stored(container_harness) == [root]


def failure_of(harness, changes, **more):
    """Run a script in an own image that cannot be imported; return its failure. The run must be free."""
    harness.submit("print('never')", **{**changes, **more})
    status = harness.wait_for_outcome(Outcome.CODE_FAILED)
    assert status.started_at is None, "no time is metered"
    assert not (harness.backend.run_folder("job-1-1") / "order.json").exists(), "the plan with the secrets is left"
    assert list((harness.folder / "runs" / ".images" / image_import.WORK_FOLDER).iterdir()) == []
    assert stored(harness) == []
    return status.failure


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("a wrong password", FailureCode.IMAGE_CREDENTIALS),
        ("a missing digest", FailureCode.IMAGE_NAME),
        ("a closed port", FailureCode.IMAGE_NETWORK),
    ],
)
def test_an_image_that_cannot_be_pulled_is_free(container_harness, own_image, kind, code):
    changes = own_image([file("small")], base=layer([]))
    image, secret = changes["image"], changes["pull_secret"]
    changes |= {
        "a wrong password": {"pull_secret": PullSecret(secret.host, USER, "x9-guess-x9")},
        "a missing digest": {"image": Image(reference=image.reference, digest=f"sha256:{'a' * 64}")},
        "a closed port": {"image": Image(reference=f"127.0.0.1:{free_ports(1)[0]}/team/train:1", digest=image.digest)},
    }[kind]
    failure = failure_of(container_harness, changes, nodes=2)
    assert (failure.code, failure.data["image"]) == (code, changes["image"].reference)
    assert "x9-guess-x9" not in container_harness.all_logs("job-1-1")


@pytest.mark.parametrize(
    ("content", "code", "limit_mib"),
    [
        pytest.param(lambda: layer([file("etc/motd")]), FailureCode.IMAGE_UNUSABLE, None, id="no Python"),
        pytest.param(lambda: gzip.compress(b"x" * 1000), FailureCode.IMAGE_NOT_UNPACKED, None, id="no archive"),
        pytest.param(
            lambda: layer([file("zeros", bytes(200 << 20))]), FailureCode.IMAGE_TOO_LARGE, 50, id="compresses well"
        ),
        # Each file counts as at least 4 KiB.
        pytest.param(lambda: many_files("files/{0}/{1}", 20_000), FailureCode.IMAGE_TOO_LARGE, 50, id="many files"),
        # Each entry of /etc becomes a mount, of which a sandbox has at most 1000.
        pytest.param(lambda: many_files("etc/{1}", 1001), FailureCode.IMAGE_NOT_UNPACKED, None, id="many in a folder"),
    ],
)
def test_an_image_that_cannot_be_used_is_free(container_harness, own_image, content, code, limit_mib):
    container_harness.backend = container_harness.new_backend(image_mib=50)
    failure = failure_of(container_harness, own_image(base=content()))
    assert (failure.code, failure.data.get("limit_mib")) == (code, limit_mib)
    assert bool(failure.data.get("detail")) == (code is FailureCode.IMAGE_NOT_UNPACKED)


def many_files(path, count):
    """Return a layer of `count` files. In `path`, {1} is a file's number, and {0} its folder: 1000 files share one."""
    return layer([file(path.format(number // 1000, number)) for number in range(count)])


@pytest.fixture
def silent_image():
    """The changes of a spec whose image is at a registry that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        yield {"image": Image(reference=f"{host}/team/train:1", digest=f"sha256:{'a' * 64}"), "labels": ORGANIZATION}


def test_a_run_says_that_its_image_is_imported_and_can_be_stopped_then(container_harness, silent_image):
    container_harness.submit("print('never')", nodes=2, **silent_image)
    status = container_harness.wait("job-1-1", lambda status: status.waiting_data.get("step") == "image")
    assert (status.phase, status.waiting_code) == (RunPhase.STARTING, WaitingCode.STARTING)
    container_harness.backend.stop("job-1-1", 5)
    status = container_harness.wait_for_end()
    assert (status.outcome, status.started_at) == (Outcome.STOPPED, None)


def test_an_import_that_takes_too_long_is_free(container_harness, silent_image):
    container_harness.backend = container_harness.new_backend(import_seconds=2)
    failure = failure_of(container_harness, silent_image)
    assert (failure.code, failure.data["limit_seconds"]) == (FailureCode.IMAGE_TOO_SLOW, 2)


def test_a_machine_without_the_programs_is_the_platforms_fault(container_harness, silent_image, tmp_path):
    container_harness.backend = container_harness.new_backend(containers_bin=str(tmp_path))
    container_harness.submit("print('never')", **silent_image)
    failure = container_harness.wait_for_failure(Outcome.PLATFORM_ERROR)
    assert "it has no skopeo and no umoci" in failure.message


def test_a_hostile_image_reaches_nothing_of_the_machine(container_harness, own_image, tmp_path):
    """Entries that leave the root folder, links that hide the run's folders, and rights that the image gives itself."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "secret").write_text("a file of the host")
    changes = own_image(
        [
            special("out", tarfile.SYMTYPE, str(victim)),
            file("out/through-a-link", b"escaped"),
            file(f"../../../../../../../../..{victim}/by-dots", b"escaped"),
            special("copy", tarfile.SYMTYPE, f"{victim}/secret"),
            special("datasets", tarfile.SYMTYPE, f"/oldroot{victim}"),
            special("trainyard", tarfile.SYMTYPE, f"/oldroot{victim}"),
            special("etc/passwd", tarfile.SYMTYPE, f"/oldroot{victim}/passwd"),
            special("etc/hosts", tarfile.SYMTYPE, f"{victim}/hosts"),
            file("etc/ld.so.preload", b"/usr/lib/evil.so\n"),
            file("usr/local/bin/become", b"#!/usr/local/bin/python3\n", 0o6755),
        ]
    )
    source = f"""
    import os
    places = ["/out", "/copy", "/datasets", "/trainyard", "/etc", {str(victim)!r}, {str(container_harness.folder)!r}]
    print([place for place in places if os.path.exists(os.path.join(place, "secret"))], os.path.exists("/copy"))
    print(os.path.exists({str(container_harness.folder)!r}), open("/etc/passwd").read().partition(":")[0])
    print(os.listdir("/datasets"), sorted(os.listdir("/trainyard")), os.path.exists("/etc/ld.so.preload"))
    print([line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapEff", "NoNewPrivs"))])
    """
    container_harness.complete(source, **changes)
    assert container_harness.log().splitlines() == [
        "[] False",
        "False trainyard",
        "['digits'] ['checkpoints', 'outputs', 'run'] False",
        "['0000000000000000', '1']",
    ]
    assert [path.name for path in victim.iterdir()] == ["secret"]


def test_a_program_in_place_of_python_is_metered_and_ends_at_the_deadline(container_harness, own_image):
    """The image decides what its Python is. This one never reports that the script runs, and still its time counts."""
    name = f"python3.{sys.version_info.minor}"
    program = f"#!/usr/local/bin/{name}\nimport time\nprint('ready', flush=True)\ntime.sleep(600)\n".encode()
    changes = own_image([file("usr/bin/python3", program, 0o755)], env=["PATH=/usr/bin"])
    container_harness.submit("", deadline_seconds=4, grace_seconds=1, **changes)  # this Python reads no script
    status = container_harness.wait_for_outcome(Outcome.TIME_LIMIT)
    assert container_harness.log() == "ready\n"
    assert status.started_at is not None


def test_a_python_that_cannot_be_executed_is_a_code_failure(container_harness, own_image):
    changes = own_image([file("usr/bin/python3", b"not a program", 0o755)], env=["PATH=/usr/bin"])
    failure = container_harness.run_to_failure(Outcome.CODE_FAILED, "print('never')", **changes)
    assert failure.rank == 0


def test_the_check_of_a_cluster_tries_the_programs_on_a_compute_node(container_harness, tmp_path):
    def result(**changes):
        config = container_harness.config(**changes)
        root = container_harness.folder / "runs"
        return check._check_containers(Slurm(config), config, root)

    found = result()
    assert found.ok, found
    assert re.search(r"The machine n\d can run own images", found.detail)
    found = result(containers_bin=str(tmp_path))
    assert (found.ok, "skopeo is not installed" in found.detail) == (False, True)
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in image_import.TOOLS:
        (broken / name).write_text("#!/bin/sh\necho no >&2\nexit 1\n")
        (broken / name).chmod(0o755)
    assert "does not run in a sandbox: no" in result(containers_bin=str(broken)).detail
    assert not list((container_harness.folder / "runs").glob(".check-*"))
