from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runtime.backends import sandbox
from runtime.specs import Mount
from tests.runtime.images_of_ours import use_image

if TYPE_CHECKING:
    from tests.runtime.conftest import Yard

PLACE = sandbox.Place(
    hostname="job-1-1-0",
    run_folder=Path("/runs/job/run"),
    checkpoint_folder=Path("/runs/job/checkpoints"),
    etc_folder=Path("/runs/job/etc/0"),
    image=Path("/images/pytorch"),
    interpreter_prefixes=(Path("/python"),),
    launcher=Path("/house/launcher"),
    mounts=(Mount("/data/deep", "/datasets/a/b"), Mount("/ws", "/workspace", False), Mount("/data/a", "/datasets/a")),
    datasets_target="/datasets",
    memory_bytes=1 << 30,
    gpus=(3,),
)


def binds(arguments: list[str], option: str) -> list[tuple[str, str]]:
    return [(arguments[at + 1], arguments[at + 2]) for at, word in enumerate(arguments) if word == option]


def test_only_three_folders_are_writable() -> None:
    arguments = sandbox.arguments(PLACE, {})
    assert binds(arguments, "--bind") == [
        ("/runs/job/run", "/trainyard/run"),
        ("/runs/job/checkpoints", "/trainyard/checkpoints"),
        ("/ws", "/workspace"),
    ]
    assert binds(arguments, "--remount-ro") == [("/dev", "--remount-ro"), ("/", "--chdir")]
    assert arguments.count("--size") == arguments.count("--tmpfs") == 2


def test_every_namespace_but_the_networks_is_its_own() -> None:
    arguments = sandbox.arguments(PLACE, {})
    kinds = {word for word in arguments if word.startswith("--unshare")}
    assert kinds == {"--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"}
    assert {"--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"} <= set(arguments)
    assert arguments[arguments.index("--cap-drop") + 1] == "ALL"


def test_inner_mounts_come_after_outer_ones() -> None:
    targets = [target for _source, target in binds(sandbox.arguments(PLACE, {}), "--ro-bind")]
    assert targets.index("/datasets/a") < targets.index("/datasets/a/b")


def test_only_the_gpus_of_the_node_are_seen() -> None:
    devices = [source for source, _target in binds(sandbox.arguments(PLACE, {}), "--dev-bind-try")]
    assert [device for device in devices if device[-1].isdigit()] == ["/dev/nvidia3"]


def test_the_environment_is_ours_alone() -> None:
    arguments = sandbox.arguments(PLACE, sandbox.base_environment(PLACE.image, ["GPU-1"]))
    environment = dict(binds(arguments, "--setenv"))
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert environment["PATH"].startswith("/images/pytorch/bin:")
    assert set(environment) <= {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "LANG",
        "CUDA_VISIBLE_DEVICES",
        "SSL_CERT_FILE",
    }


def test_the_nodes_address_has_a_name_however_it_is_asked_for(yard: Yard) -> None:
    script = """
    import socket
    for address in (("127.0.0.1", 1), ("::ffff:127.0.0.1", 1, 0, 0)): print(socket.getnameinfo(address, 8)[0])
    for name in ("localhost", socket.gethostname()):
        print({found[4][0] for found in socket.getaddrinfo(name, 1, type=socket.SOCK_STREAM)} <= {"127.0.0.1", "::1"})
    """
    yard.run(script)
    assert yard.log().split() == ["localhost", "loopback", "True", "True"]


@pytest.mark.torch
def test_a_healthy_run_of_pytorch_prints_what_its_script_prints(yard: Yard) -> None:
    """The store's sockets ask for names: where none is found, PyTorch warns in every run's log."""
    script = """
    import torch, torch.distributed
    torch.distributed.init_process_group("gloo")
    one = torch.ones(1)
    torch.distributed.all_reduce(one)
    print("sum", int(one), flush=True)
    torch.distributed.destroy_process_group()
    """
    use_image(yard, "pytorch").run(script, nodes=2)
    lines = [line for rank in range(2) for line in yard.log(rank).splitlines() if not line.startswith("[Gloo]")]
    assert lines == ["sum 2", "sum 2"]
