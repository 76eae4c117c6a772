"""The arguments of bubblewrap, and the names of a node's address in its sandbox."""

import itertools
from pathlib import Path

import pytest

from runtime.backends import sandbox
from runtime.specs import Mount

pytestmark = pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds")

SANDBOX = sandbox.Sandbox(
    hostname="job-1-1-0",
    run_folder=Path("/runs/job/run"),
    checkpoint_folder=Path("/runs/job/checkpoints"),
    output_folder=Path("/runs/job/outputs"),
    etc_folder=Path("/runs/job/etc/0"),
    image=Path("/images/pytorch"),
    interpreter_prefixes=(Path("/python"),),
    launcher=Path("/console/launcher"),
    mounts=(
        Mount("/data/deep", "/datasets/a/b"),
        Mount("/ws", "/workspace", read_only=False),
        Mount("/data/a", "/datasets/a"),
    ),
    datasets_target="/datasets",
    models_target="/models",
    memory_bytes=1 << 30,
    gpus=(3,),
)


def test_every_namespace_but_that_of_the_network_is_created_with_the_sandbox():
    """The process that starts bubblewrap is already in the run's own network."""
    arguments = sandbox.arguments(SANDBOX, {})
    kinds = {word for word in arguments if word.startswith("--unshare")}
    assert kinds == {"--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"}
    assert {"--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"} <= set(arguments)
    assert arguments[arguments.index("--cap-drop") + 1] == "ALL"


def test_only_the_gpus_of_the_node_are_seen():
    arguments = sandbox.arguments(SANDBOX, {})
    devices = [source for word, source in itertools.pairwise(arguments) if word == "--dev-bind-try"]
    assert [device for device in devices if device[-1].isdigit()] == ["/dev/nvidia3"]


def test_the_nodes_address_has_a_name_however_it_is_asked_for(harness):
    """PyTorch looks up ::ffff:127.0.0.1. Without a name in the sandbox, it would ask a name server and log an error."""
    script = """
    import socket
    for address in (("127.0.0.1", 1), ("::ffff:127.0.0.1", 1, 0, 0)):
        print(socket.getnameinfo(address, socket.NI_NAMEREQD)[0])
    for name in ("localhost", socket.gethostname()):
        print({found[4][0] for found in socket.getaddrinfo(name, 1, type=socket.SOCK_STREAM)} <= {"127.0.0.1", "::1"})
    """
    harness.run(script)
    assert harness.log().split() == ["localhost", "loopback", "True", "True"]
