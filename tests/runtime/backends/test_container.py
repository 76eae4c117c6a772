"""Customers' own images as the root of a sandbox, in real bubblewrap. The images are hostile folders."""

import json
import os
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from runtime.backends import container, sandbox
from runtime.backends.container import Container
from runtime.specs import Mount

SECRET = "a file of the host"
LOOK = """
import json, os, sys
def read(path):
    try:
        return open(path).read()
    except OSError as error:
        return error.strerror
def write(path):
    try:
        open(path, "w").close()
    except OSError as error:
        return error.strerror
    return "written"
print(json.dumps({name: eval(code) for name, code in json.loads(sys.argv[1]).items()}))
"""
"""Prints the values of the expressions in its argument, which is JSON, by their names."""


@pytest.fixture
def root(tmp_path):
    """The root folder of an image, with some files."""
    folder = tmp_path / "image" / "root"
    for name in ("usr/bin", "etc/vendor", "opt/conda", "var", "home/user", "proc", "dev"):
        (folder / name).mkdir(parents=True)
    (folder / "etc" / "motd").write_text("from the image")
    (folder / "bin").symlink_to("usr/bin")
    return folder


def sandbox_of(root, tmp_path, *, mounts=(), datasets_target="/datasets"):
    """Return a sandbox whose root is the image's."""
    run, launcher = tmp_path / "run", tmp_path / "launcher"
    for folder in (run, launcher, tmp_path / "checkpoints", tmp_path / "outputs"):
        folder.mkdir(exist_ok=True)
    sandbox.write_etc(tmp_path / "etc", "node")
    return sandbox.Sandbox(
        hostname="node",
        run_folder=run,
        checkpoint_folder=tmp_path / "checkpoints",
        output_folder=tmp_path / "outputs",
        etc_folder=tmp_path / "etc",
        image=Path("/nowhere"),
        interpreter_prefixes=(),
        launcher=launcher,
        mounts=mounts,
        datasets_target=datasets_target,
        models_target="/models",
        memory_bytes=1 << 28,
        container=Container(root, "/usr/bin/python3", {}),
    )


def look(node_sandbox, **expressions):
    """Evaluate expressions in the sandbox, with the interpreter that the launcher gets; return the values."""
    command, _mounts = container.host_interpreter()
    arguments = sandbox.arguments(node_sandbox, container.LAUNCHER_ENVIRONMENT)
    done = subprocess.run(
        [sandbox.find_bubblewrap(), *arguments, *command, "-I", "-S", "-c", LOOK, json.dumps(expressions)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_the_root_is_the_images_and_nobody_can_write_to_it(root, tmp_path):
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    seen = look(
        sandbox_of(root, tmp_path, mounts=(Mount(str(workspace), "/workspace", read_only=False),)),
        names="sorted(os.listdir('/'))",
        motd="read('/etc/motd')",
        passwd="read('/etc/passwd').partition(':')[0]",
        usr="write('/usr/new')",
        etc="write('/etc/new')",
        top="write('/new')",
        tmp="write('/tmp/new')",
        workspace="write('/workspace/new')",
        opt="os.listdir('/opt')",
        uid="os.getuid()",
    )
    assert set(seen.pop("names")) == {
        *("bin", "datasets", "dev", "etc", "home", "models", "opt", "proc", "sys", "tmp", "trainyard", "usr", "var"),
        "workspace",
    }
    assert sorted(seen.pop("opt")) == ["conda", "trainyard"]
    read_only = "Read-only file system"
    assert seen == {
        "motd": "from the image", "passwd": "trainyard", "usr": read_only, "etc": read_only, "top": read_only,
        "tmp": "written", "workspace": "written", "uid": sandbox.USER_ID,
    }  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "/oldroot", "/newroot", "/proc/self/root"])
@pytest.mark.parametrize(
    "links",
    [("workspace", "datasets", "etc", "opt", "tmp", "trainyard"), ("etc/passwd", "opt/trainyard")],
    ids=["in the root", "in its folders"],
)
def test_links_in_an_image_lead_no_mount_out_of_the_sandbox(root, tmp_path, links, prefix):
    """While bubblewrap mounts, the machine's own files are below /oldroot."""
    victim, workspace = tmp_path / "victim", tmp_path / "workspace"
    for folder in (victim, workspace):
        folder.mkdir()
    (victim / "secret").write_text(SECRET)
    for link in links:
        path = root / link
        if path.is_dir():
            path.rename(root / f"moved-{link}")
        path.symlink_to(f"{prefix}{victim}")
    seen = look(
        sandbox_of(root, tmp_path, mounts=(Mount(str(workspace), "/workspace", read_only=False),)),
        secrets=f"[read(f'/{{link}}/secret') for link in {links}]",
        written=f"[write(f'/{{link}}/written') for link in {links}]",
        passwd="read('/etc/passwd').partition(':')[0]",
        workspace="write('/workspace/result')",
    )
    assert SECRET not in seen["secrets"]
    assert (seen["passwd"], seen["workspace"]) == ("trainyard", "written")
    assert [path.name for path in victim.iterdir()] == ["secret"], "nothing was made on the host"
    assert (workspace / "result").exists()


def test_programs_of_an_image_gain_no_rights(root, tmp_path):
    """The image has a set-user-id program, a device, a pipe, and a list of libraries to load first (ld.so.preload)."""
    program = root / "usr" / "bin" / "become"
    program.write_bytes(b"#!/bin/sh\n")
    program.chmod(0o6755)
    (root / "etc" / "ld.so.preload").write_text("/usr/lib/evil.so\n")
    (root / "etc" / "ld.so.cache").write_text("not a cache")
    if os.geteuid() == 0:
        os.mknod(root / "var" / "null", 0o20666, os.makedev(1, 3))
    os.mkfifo(root / "pipe")
    seen = look(
        sandbox_of(root, tmp_path),
        flags="[line.split()[3] for line in open('/proc/self/mounts') if line.split()[1] == '/usr']",
        privileges="[line.split()[1] for line in open('/proc/self/status') if line[:6] in ('CapEff', 'NoNewP')]",
        preload="os.path.exists('/etc/ld.so.preload')",
        device="read('/var/null')",
        pipe="os.path.exists('/pipe')",
        libraries="sorted({line.split()[-1] for line in open('/proc/self/maps') if '.so' in line})",
    )
    assert {"ro", "nosuid", "nodev"} <= set(seen["flags"][0].split(","))
    assert seen["privileges"] == ["0000000000000000", "1"], "no capabilities, and no program can give any"
    assert not seen["preload"]
    assert seen["device"] in {"Permission denied", "No such file or directory"}, "only root can make devices"
    assert not seen["pipe"]
    assert all(path.startswith(container.HOST_TARGET) for path in seen["libraries"]), "they are the host's"


def test_the_image_does_not_provide_the_folders_that_contain_a_mount(root, tmp_path):
    """There, a link of the image could lead the mount out of the sandbox."""
    (root / "mnt").symlink_to("/oldroot/tmp")
    (root / "home" / "user" / "file").write_text("of the image")
    dataset = tmp_path / "digits"
    dataset.mkdir()
    mounts = (Mount(str(dataset), "/mnt/data/digits"), Mount(str(tmp_path / "run"), "/home/work", read_only=False))
    seen = look(
        sandbox_of(root, tmp_path, mounts=mounts, datasets_target="/mnt/data"),
        data="os.listdir('/mnt/data')",
        home="os.listdir('/home')",
    )
    assert seen == {"data": ["digits"], "home": ["work"]}
    (root / "opt" / "data").symlink_to("/oldroot/tmp")
    assert "/opt/data" in container.root_arguments(root, [])
    assert "/opt/data" not in container.root_arguments(root, ["/opt/data/digits"])


def test_a_program_is_found_through_the_links_of_the_image_only(root, tmp_path):
    outside = tmp_path / "python3"
    outside.write_bytes(b"")
    outside.chmod(0o755)
    assert container.find_program(root, ("python3",), container.DEFAULT_PATH) == ""
    python = root / "usr" / "bin" / "python3"
    for target in (f"{outside}", f"/{outside}"):  # POSIX leaves open what a path means that begins with two slashes
        python.symlink_to(target)
        assert container.find_program(root, ("python3",), "/usr/bin") == "", "there is no such file in the image"
        python.unlink()
    python.symlink_to("../../../../../opt/conda/python3.12")
    (root / "opt" / "conda" / "python3.12").write_bytes(b"")
    assert container.find_program(root, ("python3",), "/usr/bin") == "", "it may not be executed"
    (root / "opt" / "conda" / "python3.12").chmod(0o755)
    assert container.find_program(root, ("python3", "python"), "relative:/bin") == "/bin/python3"
    python.unlink()
    python.symlink_to("python")
    (root / "usr" / "bin" / "python").symlink_to("python3")
    assert container.find_program(root, ("python3", "python"), "/usr/bin") == "", "the links are a loop"


def test_entries_of_links_are_not_listed(root, tmp_path):
    """An image whose /etc is a link to a folder with many entries."""
    many = tmp_path / "many"
    many.mkdir()
    for number in range(20):
        (many / str(number)).touch()
    before = container.count_entries(root)
    (root / "etc" / "vendor").rmdir()
    (root / "etc" / "motd").unlink()
    (root / "etc").rmdir()
    (root / "etc").symlink_to(many)
    assert container.count_entries(root) == before - 2, (
        "the link counts as one entry, as the folder did; its two entries are gone"
    )
    assert not any(str(many) in word for word in container.root_arguments(root, []))


def test_ranks_get_the_images_variables_and_the_launcher_does_not(root):
    of_a_builtin_image = {
        "PATH": "/host/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "SSL_CERT_FILE": "/etc/x", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    image = Container(root, "/usr/bin/python3", {"PATH": "/conda/bin", "HOME": "/root", "LD_PRELOAD": "/evil.so"})
    # PATH, LANG and SSL_CERT_FILE come from the image; without its own LANG, there is a default. The platform's other
    # variables take precedence over the image's.
    assert image.rank_environment(of_a_builtin_image) == {
        "PATH": "/conda/bin", "LANG": "C.UTF-8", "LD_PRELOAD": "/evil.so", "HOME": "/tmp", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    assert Container(root, "/python", {}).rank_environment(of_a_builtin_image)["PATH"] == container.DEFAULT_PATH
    assert "LD_PRELOAD" not in container.LAUNCHER_ENVIRONMENT


def test_the_launchers_interpreter_is_this_machines():
    command, mounts = container.host_interpreter()
    interpreter = PurePosixPath(command[-3])  # before the options "-X", "utf8"
    assert str(interpreter) == f"{container.HOST_TARGET}{Path(sys.executable).resolve()}"
    targets = [mounts[at + 2] for at, word in enumerate(mounts) if word == "--ro-bind"]
    assert all(
        any(PurePosixPath(path).is_relative_to(target) for target in targets) for path in (command[0], interpreter)
    )


def test_the_launcher_looks_for_no_library_in_folders_that_its_libraries_name():
    """Such a folder (DT_RPATH) would be the image's. In the list of ignored files, "" stands for the interpreter."""
    command, _mounts = container.host_interpreter()
    ignored = command[command.index("--inhibit-rpath") + 1].split(":")
    lines = Path("/proc/self/maps").read_text().splitlines()
    loaded = {line.split(maxsplit=5)[-1] for line in lines if "lib-dynload" in line}
    assert "" in ignored
    assert command[0] in ignored
    assert loaded
    assert {f"{container.HOST_TARGET}{path}" for path in loaded} <= set(ignored)


def test_an_interpreter_without_a_folder_of_its_own_or_with_libraries_outside_it_is_refused(monkeypatch):
    """Its folder is mounted in the sandbox. The dynamic linker would look for other libraries in the image."""
    loader, outside = Path("/usr/lib/ld-linux-x86-64.so.2"), Path("/apps/spack/zlib-1.3/lib/libz.so.1")
    monkeypatch.setattr(container, "_loaded_libraries", lambda: [loader, outside])
    with pytest.raises(OSError, match=f"has loaded {outside}, which lies neither below /usr"):
        container.host_interpreter()
    # An interpreter of the same folder is mounted together with the library.
    monkeypatch.setattr(container.sys, "executable", "/apps/spack/zlib-1.3/bin/python3")
    container.host_interpreter()
    monkeypatch.setattr(container.sys, "executable", "/python/python3")  # its folder is two levels up: /
    with pytest.raises(OSError, match="the whole machine"):
        container.host_interpreter()
