"""Runs of the real archive in PID namespaces: what the code sees, how nodes connect, how a run ends."""

import json
import signal
import socket

import pytest

from runtime.launcher.signed_record import STOP_FILE, sign_stop
from tests.runtime.launcher.pods import KEY, RUN, free_port

pytestmark = pytest.mark.late("its pods are real processes, with time limits of seconds")

SHOW = """
import json, os, sys
print(json.dumps({"env": dict(os.environ), "cwd": os.getcwd(), "argv": sys.argv, "path": sys.path[0]}))
open("made-" + os.environ["RANK"], "w").close()
"""
MEET = """
import json, os, socket, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(place) as listener:
        peers = [listener.accept()[0] for _ in range(size - 1)]
        total = sum(json.loads(peer.makefile().readline()) for peer in peers)
        for peer in peers:
            peer.sendall(f"{total}\\n".encode())
else:
    while True:
        try:
            peer = socket.create_connection(place)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    peer.sendall(f"{rank}\\n".encode())
    total = int(peer.makefile().readline())
print("total", total)
"""
IGNORES_SIGTERM = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True: signal.pause()
"""


def started(pod):
    at = pod.record["started_at"]
    assert isinstance(at, float)
    return at


def test_the_code_sees_the_contract_and_nothing_of_the_cluster(cluster):
    cluster.start(SHOW, 2, plan={"workers": 2}, environment={"ADDED": "by the order"})
    assert cluster.wait() == [0, 0]
    for rank in range(4):
        seen = json.loads(cluster.log(rank))
        env = seen["env"]
        assert (env["RANK"], env["LOCAL_RANK"], env["NODE_RANK"]) == (str(rank), str(rank % 2), str(rank // 2))
        assert (env["WORLD_SIZE"], env["WORKER_PER_NODE"], env["MASTER_ADDR"]) == ("4", "2", cluster.addresses[0])
        assert (env["EPOCHS"], env["LR"], env["BATCH_SIZE"], env["BACKEND"]) == ("3", "0.1", "16", "gloo")
        assert (env["DATASETS"], env["DATASETS_PATH"], env["RUN_DIR"]) == ("mnist", "/datasets", "/trainyard/run")
        assert (env["HOME"], env["USER"]) == ("/tmp", "trainyard")
        assert (env["OF_THE_IMAGE"], env["ADDED"]) == ("kept", "by the order")
        assert not [name for name in env if name.startswith(("TRAINYARD_", "KUBERNETES_"))]
        assert (seen["cwd"], seen["path"], seen["argv"]) == ("/workspace", "/workspace", ["/workspace/train.py"])
    assert (cluster.root / "run" / "tensorboard").is_dir()
    for path in (cluster.root / "logs" / "rank-0.log", cluster.root / "nodes" / "0.json", cluster.workspace / "made-0"):
        assert path.stat().st_mode & 0o060 == 0o060, f"{path} can be read and written by the group"


def test_three_nodes_connect_though_their_names_resolve_late(cluster):
    pods = cluster.start(MEET, 3, late_names=True)
    cluster.wait_for((cluster.root / "nodes" / "2.json").exists)
    assert not any(map(cluster.log, range(3)))
    cluster.publish()
    assert cluster.wait() == [0, 0, 0]
    assert {cluster.log(rank) for rank in range(3)} == {"total 3\n"}
    for pod in pods:
        record = pod.record
        assert (record["run"], record["phase"], record["exit_code"], record["causes"]) == (RUN, "ended", 0, [])
        assert record["address"] == pod.address
        assert record["started_at"] <= record["finished_at"]
    assert max(map(started, pods)) - min(map(started, pods)) < 5, "ranks start together"


def test_a_name_that_resolves_to_an_earlier_pod_is_resolved_again(cluster):
    """Cluster DNS caches for half a minute, so the address may belong to another run's Pod by now."""
    port = free_port()
    with socket.create_server(("127.250.9.9", port)) as stranger:
        stranger.settimeout(60)
        cluster.hosts.write_text(f"127.0.0.1 localhost\n127.250.9.9 {RUN}-0.{RUN} {RUN}-1.{RUN}\n")
        pods = cluster.start(MEET, 2, late_names=True, control_port=port)
        connection = stranger.accept()[0]
        assert b"hello" in connection.recv(4096)
        connection.close()  # it does not know this token
        cluster.hosts.write_text("127.0.0.1 localhost\n")
        cluster.publish()
        assert cluster.wait() == [0, 0]
    assert {cluster.log(rank) for rank in range(2)} == {"total 1\n"}
    assert [pod.record["causes"] for pod in pods] == [[], []]


def test_names_that_never_resolve_end_the_start(cluster):
    (pod, other) = cluster.start(MEET, 2, late_names=True, start_seconds=1)
    assert cluster.wait() == [1, 1]
    assert pod.causes == other.causes == [("platform_error", "nodes_not_met")]
    assert pod.record["started_at"] is None


def test_a_node_that_does_not_come_ends_the_start(cluster):
    (pod,) = cluster.start(MEET, 2, only=[0], start_seconds=2)
    assert pod.wait() == 1
    assert pod.causes == [("platform_error", "nodes_not_met")]
    assert pod.record["started_at"] is None


@pytest.mark.parametrize("framework", ["tensorflow", "horovod"])
def test_tensorflow_and_horovod_get_the_pods_addresses(cluster, framework):
    source = """
    import os, urllib.request
    if "TF_CONFIG" in os.environ:
        print(os.environ["TF_CONFIG"])
    else:
        place = "http://{HOROVOD_GLOO_RENDEZVOUS_ADDR}:{HOROVOD_GLOO_RENDEZVOUS_PORT}/scope/key".format(**os.environ)
        urllib.request.urlopen(urllib.request.Request(place, data=b"value", method="PUT"))
        print(place, urllib.request.urlopen(place).read())
    """
    cluster.start(source, 2, plan={"framework": framework})
    assert cluster.wait() == [0, 0]
    if framework == "tensorflow":
        workers = json.loads(cluster.log(1))["cluster"]["worker"]
        assert [worker.split(":")[0] for worker in workers] == cluster.addresses
    else:
        assert cluster.log(1).startswith(f"http://{cluster.addresses[0]}:")
        assert cluster.log(1).endswith("b'value'\n")


def test_a_stop_ends_what_ignores_it_when_the_grace_is_over(cluster):
    (pod,) = cluster.start(IGNORES_SIGTERM, grace_seconds=1)
    cluster.wait_for_text("ready")
    pod.signal(signal.SIGTERM)
    assert pod.wait(20) == 1
    assert pod.causes == [("stopped", "stopped")]
    assert pod.record["exit_code"] is None


@pytest.mark.slow
def test_only_a_signed_request_shortens_the_grace_period(cluster):
    (pod,) = cluster.start(IGNORES_SIGTERM, grace_seconds=600)
    cluster.wait_for_text("ready")
    request = cluster.root / "nodes" / STOP_FILE
    pod.signal(signal.SIGTERM)
    record = cluster.root / "nodes" / "0.json"
    cluster.wait_for(lambda: b'"stopping"' in record.read_bytes())
    request.write_bytes(sign_stop(RUN, 0, "guessed"))
    heartbeat = record.stat().st_mtime_ns
    cluster.wait_for(lambda: record.stat().st_mtime_ns != heartbeat)
    assert pod.process.poll() is None, "it has looked a few times since"
    request.unlink()
    request.write_bytes(sign_stop(RUN, 1, KEY))
    assert pod.wait(60) == 1
    assert pod.causes == [("stopped", "stopped")]


def test_a_stop_while_nodes_connect(cluster):
    (pod,) = cluster.start(IGNORES_SIGTERM, 2, only=[1], late_names=True)
    cluster.wait_for((cluster.root / "nodes" / "1.json").exists)
    pod.signal(signal.SIGTERM)
    assert pod.wait(20) == 1
    assert pod.causes == [("stopped", "stopped")]
    assert pod.record["started_at"] is None


def test_a_pod_enforces_its_deadline(cluster):
    (pod,) = cluster.start(IGNORES_SIGTERM, deadline_seconds=3, grace_seconds=1)
    assert pod.wait(30) == 1
    record = pod.record
    assert pod.causes == [("time_limit", "time_limit")]
    assert record["causes"][0]["data"] == {"limit_seconds": 3}
    assert record["finished_at"] - record["started_at"] < 3.5
    assert record["causes"][0]["at"] - record["started_at"] >= 1.9, "SIGTERM comes a grace before"


def test_a_hang_in_a_pod_is_reported_with_stacks(cluster):
    source = """
    import threading
    print("before the lock", flush=True)
    threading.Lock().acquire() and threading.Event().wait()
    """
    (pod, _other) = cluster.start(source, 2, plan={"hang_seconds": 3})
    assert cluster.wait() == [1, 1]
    assert pod.causes == [("hung", "hung")]
    (cause,) = pod.record["causes"]
    assert cause["data"]["progress_at"] < cause["at"] - 2
    for rank in range(2):
        assert "train.py" in (cluster.root / "logs" / f"stacks-{rank}.txt").read_text()
        assert (cluster.root / "nodes" / f"{rank}.samples.jsonl").exists()


def test_an_elastic_run_continues_without_a_lost_pod(cluster):
    source = """
    import os, signal, subprocess, sys, time
    mine = [os.getpid(), os.getppid(), 1]
    print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["RESTART_COUNT"], os.environ["MASTER_ADDR"])
    if os.environ["RESTART_COUNT"] == "0":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print("ready", flush=True)
        while True: signal.pause()
    print("others", [name for name in os.listdir("/proc") if name.isdigit() and int(name) not in mine])
    """
    pods = cluster.start(source, 3, plan={"min_nodes": 2})
    for rank in range(3):
        cluster.wait_for_text("ready", rank)
    pods[1].signal(signal.SIGKILL)
    assert [pods[0].wait(), pods[2].wait()] == [0, 0]
    assert pods[1].termination.read_bytes() == b"", "a pod that is killed says nothing"
    record = pods[0].record
    assert (record["round"], record["causes"]) == (1, [])
    assert [entry["nodes"] for entry in record["members"]] == [[0, 2]]
    assert f"1 2 1 {cluster.addresses[0]}" in cluster.log(2)
    assert "others []" in cluster.log(2), "nothing of the round before is left"


def test_a_pod_that_exceeds_its_disk_limit_is_ended(cluster):
    """The others of an elastic run do not take it for lost, which would let them continue without it."""
    source = """
    import os, time
    if os.environ["RANK"] == "0":
        open(os.environ["RUN_DIR"] + "/large", "wb").write(os.urandom(3 << 20))
    time.sleep(600)
    """
    pods = cluster.start(source, 3, disk_bytes=1 << 20, plan={"min_nodes": 1})
    assert cluster.wait() == [1, 1, 1]
    assert [pod.causes for pod in pods] == [[("disk_full", "disk_full")]] * 3
    assert {pod.record["round"] for pod in pods} == {0}


def test_a_rank_killed_for_memory_is_reported(cluster):
    group = cluster.folder / "cgroup"
    group.mkdir()
    (group / "memory.events").write_text("low 0\noom 0\noom_kill 2\n")
    cluster.control_group = group
    (pod,) = cluster.start(
        """
        import os, pathlib, signal, time
        print("ready", flush=True)
        while not pathlib.Path("/workspace/now").exists(): time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        memory_bytes=512 << 20,
    )
    cluster.wait_for_text("ready")
    (group / "memory.events").write_text("low 0\noom 1\noom_kill 3\n")
    (cluster.workspace / "now").touch()
    assert pod.wait() == 1
    (cause,) = pod.record["causes"]
    assert (cause["kind"], cause["rank"], cause["signal"]) == ("out_of_memory", 0, "SIGKILL")
    assert cause["data"] == {"limit_mib": 512}
