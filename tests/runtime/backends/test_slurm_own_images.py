"""Rules for customers' own images on Slurm that need no Slurm: refusals, errors of programs, and removal."""

import base64
import dataclasses
import errno
import json
import os
import signal
import threading
import time
import uuid
from pathlib import Path

import pytest

from runtime.backends import container
from runtime.backends.container import Container
from runtime.backends.sandbox import find_bubblewrap
from runtime.backends.slurm import image_import, images, node, submission
from runtime.backends.slurm.backend import SlurmBackend
from runtime.backends.slurm.config import SlurmConfig
from runtime.backends.slurm.pending import explain_waiting
from runtime.backends.slurm.states import SlurmJob
from runtime.errors import InvalidSpec
from runtime.specs import Controller, FailureCode, Framework, Image, Mount, Outcome, Resources, RunSpec
from runtime.trash import Trash

DIGEST = f"sha256:{'a' * 64}"
OWN = Image(reference="registry.example.com:5000/team/train:1", digest=DIGEST)
PLAN = {
    "folder": "", "reference": OWN.reference, "digest": DIGEST, "host": "registry.example.com:5000", "username": "",
    "password": "", "limit_mib": 100, "seconds": 5, "bin": "", "is_insecure": False,
}  # fmt: skip
"""The plan by which node 0 imports the image OWN."""
RUN_PLAN = {"bubblewrap": "bwrap", "fallback_bubblewrap": ""}
"""The part of a run's plan that an import reads."""


def config(**changes):
    return SlurmConfig.from_data("hpc", {"containers": "oci", **changes})


def spec(**changes):
    values = {"name": "job-1-1", "framework": Framework.PYTORCH, "image": OWN, "nodes": 1, "workers_per_node": 1}
    values |= {"resources": Resources(cpus=1, memory_mib=1000), "script": "train.py", "deadline_seconds": 600}
    return RunSpec(**{**values, "labels": {"organization": "acme"}, **changes})


def write_program(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def backend(tmp_path, bare_images):
    """Return a function that returns a backend with these settings."""
    return lambda **changes: SlurmBackend(config=config(**changes), root=tmp_path / "runs", images_root=bare_images)


@pytest.mark.parametrize(
    ("cluster", "changes", "field"),
    [
        ({"containers": ""}, {}, "image"),
        ({}, {"resources": Resources(cpus=1, memory_mib=1000, gpus=1)}, "gpus"),
        ({}, {"controller": Controller.MPI}, "controller"),
        ({}, {"packages": "/packages"}, "packages"),
        ({}, {"image": Image(reference="registry.example.com/team/train --all")}, "image"),
        ({}, {"image": Image(reference="--help")}, "image"),
        ({}, {"image": Image(reference="registry.example.com/team/train\n")}, "image"),
        ({}, {"image": Image(builtin="unbuilt")}, "image"),
    ],
)
def test_what_own_images_cannot_do_on_a_cluster_is_refused(backend, cluster, changes, field):
    backend().check_image(OWN)
    with pytest.raises(InvalidSpec) as refused:
        backend(**cluster)._admit(spec(**changes))
    assert refused.value.field == field


def test_the_check_of_a_cluster_names_an_interpreter_that_own_images_cannot_use(tmp_path, monkeypatch):
    def refuse():
        raise OSError("This machine's Python has no dynamic linker of glibc.")

    monkeypatch.setattr(image_import, "check_tools", lambda _tools, _bubblewrap: "")
    monkeypatch.setattr(node, "host_interpreter", refuse)
    node.check_containers("", "", "bwrap", tmp_path / "result")  # "": skopeo and umoci are on the PATH
    assert json.loads((tmp_path / "result").read_bytes())["problem"] == (
        "This machine's Python has no dynamic linker of glibc."
    )


def test_the_check_of_a_cluster_names_a_program_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(image_import, "_CHECK_SECONDS", 0.2)
    for name in ("skopeo", "umoci", "bwrap"):
        write_program(tmp_path / name, "exec sleep 60")
    problem = image_import.check_tools(str(tmp_path), str(tmp_path / "bwrap"))
    assert problem == f"{tmp_path / 'skopeo'} does not answer in 0.2 s."


def test_slurms_time_limit_leaves_room_for_the_import():
    def minutes(image):
        arguments = submission.arguments(spec(image=image), config(), job_name="j", log="/l")
        return int(next(word for word in arguments if word.startswith("--time=")).partition("=")[2])

    assert minutes(OWN) - minutes(Image(builtin="bare")) == SlurmConfig.import_seconds // 60


def test_a_run_that_imports_its_image_says_so():
    running = SlurmJob("7", "RUNNING")
    assert explain_waiting(running, is_importing=True).data == {"step": "image"}
    assert explain_waiting(running).data == {"step": "supervisor"}
    assert explain_waiting(SlurmJob("7", "PENDING"), is_importing=True).data == {"step": "place"}


@pytest.mark.parametrize(
    ("reference", "digest", "pulled"),
    [
        ("r.example:5000/team/train:1", DIGEST, f"r.example:5000/team/train@{DIGEST}"),
        ("r.example/team/train:1", "", "r.example/team/train:1"),
        (f"r.example/train@{DIGEST}", "", f"r.example/train@{DIGEST}"),
        (f"r.example/train:1@{DIGEST}", DIGEST, f"r.example/train@{DIGEST}"),
    ],
)
def test_an_image_is_pulled_by_its_digest_if_that_is_known(reference, digest, pulled):
    assert image_import.transport_reference(reference, digest) == f"docker://{pulled}"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("reading manifest 1 in r.example/train: manifest unknown", FailureCode.IMAGE_NAME),
        ("reading manifest 1 in r.example/train: name unknown: repository not found", FailureCode.IMAGE_NAME),
        ("unable to retrieve auth token: invalid username/password: unauthorized", FailureCode.IMAGE_CREDENTIALS),
        ("requested access to the resource is denied", FailureCode.IMAGE_CREDENTIALS),
        ("reading manifest 1 in r.example/x: received unexpected HTTP status: 403 Forbidden",
         FailureCode.IMAGE_CREDENTIALS),
        ("pinging container registry r.example: dial tcp: lookup r.example: no such host", FailureCode.IMAGE_NETWORK),
        ("x509: certificate signed by unknown authority", FailureCode.IMAGE_NETWORK),
        ("", FailureCode.IMAGE_NETWORK),
    ],
)  # fmt: skip
def test_errors_of_skopeo_have_a_code(text, code):
    assert image_import.classify_pull_error(text) is code


def test_the_password_is_in_no_argument_of_a_program(tmp_path, monkeypatch):
    commands = []
    plan = {**PLAN, "username": "robot$team", "password": 'a "b" $(c)'}
    importer = importer_with(tmp_path, monkeypatch, plan=plan)
    monkeypatch.setattr(importer, "_run_program", lambda command, credentials: commands.append((command, credentials)))
    importer._pull()
    ((command, credentials),) = commands
    assert not any(plan["password"] in word or plan["username"] in word for word in command)
    assert "--src-authfile=/auth.json" in command
    (token,) = json.loads(credentials)["auths"].values()
    assert base64.b64decode(token["auth"]).decode() == f"{plan['username']}:{plan['password']}"
    assert importer._without_password(f"error: {plan['password']}") == "error: ***"


def importer_with(tmp_path, monkeypatch, bubblewrap="bwrap", plan=PLAN):
    """Return an importer that needs no skopeo and no umoci, gives up after a minute, and that nobody stops."""
    monkeypatch.setattr(image_import, "find_tools", lambda _folder: dict.fromkeys(image_import.TOOLS, "/usr/bin/env"))
    (tmp_path / "files").mkdir()
    return image_import._Importer(plan, tmp_path, bubblewrap, time.monotonic() + 60, lambda: False)


def test_a_program_sees_its_working_folder_and_credentials_that_are_on_no_disk(tmp_path, monkeypatch):
    """It reads them in its sandbox as /auth.json, which is no file in the folder of the import."""
    importer = importer_with(tmp_path, monkeypatch, find_bubblewrap())
    monkeypatch.setenv("OURS", "1")
    hidden = f"{tmp_path} {__file__} /proc/{os.getpid()}"
    writes = "touch /new; touch /usr/new; ls -d /new /usr/new"
    script = f'(cat /auth.json; ls -d {hidden}; {writes}; echo "$OURS") 2>/dev/null'
    assert importer._run_program(["/usr/bin/sh", "-c", script], b"the credentials") is None
    assert (tmp_path / "log").read_bytes() == b"the credentials\n"
    assert list((tmp_path / "files").iterdir()) == []


# If SIGTERM (15) ends its program, bubblewrap exits with 128 + 15.
@pytest.mark.parametrize("end", ["kill -TERM $$", "exit 143"], ids=["bubblewrap", "its program"])
def test_a_program_that_slurm_ended_has_not_failed(tmp_path, monkeypatch, end):
    write_program(tmp_path / "bwrap", end)
    with pytest.raises(image_import.ImportStopped):
        importer_with(tmp_path, monkeypatch, str(tmp_path / "bwrap"))._run_program(["skopeo"])


@pytest.mark.parametrize(
    ("replaced", "code", "error"),
    [
        ((image_import, "import_image"), FailureCode.PLATFORM_ERROR, OSError(errno.ENOLCK, "No locks available")),
        ((image_import, "import_image"), FailureCode.PLATFORM_ERROR, OSError("No locks available")),
        ((node, "host_interpreter"), FailureCode.NODE_NOT_STARTED, OSError("No locks available")),
    ],
)
def test_an_error_of_the_importing_node_ends_the_run_as_the_platforms_fault(
    tmp_path, monkeypatch, replaced, code, error
):
    """Otherwise the other nodes would wait for the import's whole time limit."""

    def refuse(*_arguments, **_options):
        raise error

    monkeypatch.setattr(*replaced, refuse)
    plan = {**PLAN, "folder": str(tmp_path / "image")}
    assert node._container(RUN_PLAN, plan, tmp_path, is_importer=True) is None
    cause = json.loads((tmp_path / "end.json").read_bytes())["loss"]
    assert (cause["kind"], cause["code"]) == ("platform_error", code)
    assert "No locks available" in cause["message"]


def test_the_other_nodes_get_the_images_contents_from_the_first(tmp_path, monkeypatch):
    """They may not see the image's own files yet: NFS clients cache that a file is missing."""
    contents = {"root": "root-1", "python": "/python", "environment": {"A": "1"}}
    monkeypatch.setattr(image_import, "import_image", lambda *_arguments, **_options: contents)
    plan, run_plan = {**PLAN, "folder": str(tmp_path / "missing")}, {**RUN_PLAN, "start_seconds": 0}
    expected = Container(tmp_path / "missing" / "root-1", "/python", {"A": "1"})
    assert node._container(run_plan, plan, tmp_path, is_importer=True) == expected
    assert node._container(run_plan, plan, tmp_path, is_importer=False) == expected


def test_sigterm_ends_a_node_after_its_import_has_removed_its_files(tmp_path, monkeypatch):
    """Slurm sends it when it cancels or preempts a job."""
    events = []

    def import_until_stopped(_plan, *, bubblewrap, is_stopped):
        assert bubblewrap == "bwrap"
        assert not is_stopped()
        (tmp_path / "end.json").write_text("{}")  # of another node, which cannot start
        assert is_stopped()
        (tmp_path / "end.json").unlink()
        os.kill(os.getpid(), signal.SIGTERM)
        assert is_stopped()
        events.append("files removed")
        raise image_import.ImportStopped

    monkeypatch.setattr(image_import, "import_image", import_until_stopped)
    previous = signal.signal(signal.SIGTERM, lambda *_: events.append("ended"))
    try:
        node._import_image(RUN_PLAN, PLAN, tmp_path)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert events == ["files removed", "ended"]
    assert not (tmp_path / "end.json").exists()


class UnpackedImage:
    """An importer whose image is already unpacked."""

    def __init__(self, _plan, work, *_arguments):
        self.root = work / "files" / "root"

    def run(self):
        self.root.mkdir()
        return {"root": f"root-{uuid.uuid4().hex}", "python": "/python", "environment": {}}


def import_image(folder):
    plan = {**PLAN, "folder": str(folder)}
    image_import.import_image(plan, bubblewrap="bwrap", is_stopped=lambda: False)
    return folder / image_import.load_contents(folder)["root"]


def test_an_import_deletes_no_root_that_runs_may_use(tmp_path, monkeypatch):
    """A node does not see that another one has just recorded the image."""
    monkeypatch.setattr(image_import, "_Importer", UnpackedImage)
    folder = tmp_path / image_import.IMAGES_FOLDER / "acme" / "image"
    first = import_image(folder)
    (first / "file").touch()
    assert import_image(folder) == first
    (folder / "image.json").unlink()
    assert import_image(folder) != first
    assert (first / "file").exists()


def make_long_links(root, _monkeypatch):
    """Make links whose targets are together longer than bubblewrap's arguments may be; Linux allows 4095 bytes each."""
    for number in range(container.MAX_ARGUMENT_BYTES // 4000 + 1):
        (root / f"link{number}").symlink_to("x" * 4000)


def close_etc(_root, monkeypatch):
    """Let the folder /etc of the image look closed. The tests may run as root, who can read every folder."""

    def refuse(_root):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(container, "count_entries", refuse)


@pytest.mark.parametrize(
    ("prepare", "variables", "reason"),
    [
        (make_long_links, {}, "too long targets"),
        (close_etc, {}, "Permission denied"),
        (lambda *_: None, {"PATH": f"/{'x' * 300}"}, "File name too long"),
    ],
    ids=["long links", "closed folder", "long PATH"],
)
def test_an_image_that_cannot_be_read_is_the_customers_fault(tmp_path, monkeypatch, prepare, variables, reason):
    monkeypatch.setattr(image_import, "_image_environment", lambda _layout: variables)
    importer = importer_with(tmp_path, monkeypatch)
    importer.root.mkdir()
    prepare(importer.root, monkeypatch)
    monkeypatch.setattr(importer, "_run_program", lambda *_arguments: None)
    with pytest.raises(image_import.ImportFailed, match=reason) as failed:
        importer.run()
    assert (failed.value.outcome, failed.value.code) == (Outcome.CODE_FAILED, FailureCode.IMAGE_NOT_UNPACKED)


@pytest.mark.parametrize(("output", "reason"), [("", "no output"), (None, "it is empty")])
def test_only_an_image_that_was_unpacked_can_be_empty(tmp_path, monkeypatch, output, reason):
    importer = importer_with(tmp_path, monkeypatch)
    monkeypatch.setattr(importer, "_run_program", lambda *_arguments: output)
    with pytest.raises(image_import.ImportFailed, match=f"could not be unpacked: {reason}"):
        importer._unpack()


def test_a_full_disk_is_the_platforms_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(image_import.disk, "free_bytes", lambda _folder: 1 << 20)
    importer = importer_with(tmp_path, monkeypatch)
    with pytest.raises(image_import.ImportFailed) as failed:
        importer._check_limits()
    assert (failed.value.outcome.value, failed.value.code) == ("platform_error", FailureCode.DISK_FULL)


@pytest.mark.parametrize(
    ("lines", "variables"),
    [
        (["PATH=/bin", "A=b=c", "EMPTY="], {"PATH": "/bin", "A": "b=c", "EMPTY": ""}),
        (["RANK=7", "CUDA_VISIBLE_DEVICES=0", "TRAINYARD_TOKEN=x", "no name=1", "NOVALUE"], {}),
        (["BIG=" + "x" * 70_000], {}),
        ("PATH=/bin", {}),
        (None, {}),
    ],
    ids=["usual", "reserved", "large", "text", "none"],
)
def test_the_variables_of_an_image_are_those_that_an_order_may_set(tmp_path, lines, variables):
    assert image_import._image_environment(write_layout(tmp_path, {"config": {"Env": lines}})) == variables


@pytest.mark.parametrize(
    "index",
    ['{"manifests": [{"digest": "sha256:../../../../etc/passwd"}]}', "[" * 200_000],
    ids=["names a file outside", "is nested too deeply"],
)
def test_a_layout_that_cannot_be_read_sets_no_variables(tmp_path, index):
    assert image_import._image_environment(tmp_path) == {}, "there is no index"
    (tmp_path / "index.json").write_text(index)
    assert image_import._image_environment(tmp_path) == {}


def write_layout(folder, image_config):
    """Write an image as skopeo stores it: an index that names a manifest, which names the configuration."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    (blobs / ("c" * 64)).write_text(json.dumps(image_config))
    (blobs / ("b" * 64)).write_text(json.dumps({"config": {"digest": f"sha256:{'c' * 64}"}}))
    (folder / "index.json").write_text(json.dumps({"manifests": [{"digest": f"sha256:{'b' * 64}"}]}))
    return folder


def test_an_image_belongs_to_an_organization_a_repository_and_a_digest(tmp_path):
    folders = {
        images.image_folder(tmp_path, spec(**changes))
        for changes in (
            {},
            {"labels": {"organization": "rival"}},
            {"image": dataclasses.replace(OWN, reference="other.example.com/team/train:1")},
            {"image": dataclasses.replace(OWN, digest=f"sha256:{'b' * 64}")},
            {"image": dataclasses.replace(OWN, digest="")},
            {"image": dataclasses.replace(OWN, digest=""), "name": "job-1-2"},
        )
    }
    assert len(folders) == 6, "each has a folder of its own"
    assert images.image_folder(tmp_path, spec(name="job-2-1")) in folders


def test_a_run_stays_submitted_if_unused_images_cannot_be_removed(backend, tmp_path, monkeypatch, caplog):
    def fail(*_arguments):
        raise PermissionError("no")

    monkeypatch.setattr(images, "move_unused_to_trash", fail)
    machine = "NodeName=c0 CPUTot=8 RealMemory=16000 State=IDLE Partitions=cpu"
    for name, output in (("scontrol", machine), ("sbatch", "7"), ("train.py", "")):  # 7: the number of the job
        write_program(tmp_path / name, f"echo '{output}'")
    submitted = backend(bin=str(tmp_path))
    submitted.submit(spec(mounts=(Mount(str(tmp_path), "/workspace", read_only=False),)))
    assert submitted.names(live=True) == ["job-1-1"]
    assert "Unused images could not be moved" in caplog.text


def test_an_image_is_not_removed_while_its_first_use_is_noted(tmp_path, monkeypatch):
    touch = Path.touch
    arguments = (tmp_path, Trash(tmp_path / ".trash"), (), 900)
    remover = threading.Thread(target=images.move_unused_to_trash, args=arguments)

    def touch_late(path, **more):
        remover.start()
        remover.join(0.2)  # it waits for the lock
        touch(path, **more)

    monkeypatch.setattr(Path, "touch", touch_late)
    images.image_plan(tmp_path, spec(image=OWN), config())
    remover.join()
    assert images.image_folder(tmp_path, spec(image=OWN)).exists()


def test_unused_images_are_removed(tmp_path):
    """Each organization keeps the images that it used last, for two weeks after their use. Images of live runs stay."""

    def store(organization, number, days):
        """Make an image of the organization that was last used so many days ago; 14 are the limit."""
        changes = {"image": dataclasses.replace(OWN, digest=f"sha256:{number:064}")}
        own = spec(labels={"organization": organization}, **changes)
        images.image_plan(tmp_path, own, config())
        folder = images.image_folder(tmp_path, own)
        at = time.time() - days * 86400
        os.utime(folder / image_import.USED_FILE, (at, at))
        return folder

    recent = [store("acme", number, 1 + number / 100) for number in range(images.KEEP_IMAGES + 3)]
    just_used = store("acme", 100, 0)
    old, old_in_use = store("rival", 1, 15), store("rival", 2, 15)
    stale = tmp_path / image_import.IMAGES_FOLDER / image_import.WORK_FOLDER / "dead"
    fresh = stale.with_name("fresh")
    for folder in (stale, fresh):
        folder.mkdir(parents=True)
    # A working folder is stale an hour after the time limit of imports, which is 900 s here.
    os.utime(stale, (time.time() - 900 - 3700,) * 2)
    os.utime(fresh, (time.time() - 900 - 3500,) * 2)
    used = {old_in_use, recent[-1]}
    assert images.move_unused_to_trash(tmp_path, Trash(tmp_path / ".trash"), used, import_seconds=900)
    remaining = [folder for folder in (just_used, old, old_in_use, stale, fresh) if folder.exists()]
    assert remaining == [just_used, old_in_use, fresh]
    kept = images.KEEP_IMAGES - 1  # `just_used` is the newest
    assert [folder.exists() for folder in recent] == [True] * kept + [False] * 3 + [True], "the last one is in use"
    assert not images.move_unused_to_trash(tmp_path, Trash(tmp_path / ".trash"), used, import_seconds=900)
