"""Runs of the real archive in real pid namespaces: what the code sees, how nodes meet, how a run ends."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.launcher.report import first_cause
from runtime.launcher.signed import STOP_FILE, sign_stop
from tests.runtime.launcher.pods import KEY, RUN, Cluster, Pod, has_bubblewrap

pytestmark = pytest.mark.skipif(not has_bubblewrap(), reason="needs bubblewrap")

SHOW = """
import json, os, sys
print(json.dumps({"env": dict(os.environ), "cwd": os.getcwd(), "argv": sys.argv, "path": sys.path[0]}))
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
PATIENT = """
import os, signal, time
def leave(number, frame):
    open(os.environ["CHECKPOINT_DIR"] + "/last", "w").write("saved")
    raise SystemExit(0)
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
while True: signal.pause()
"""
DEAF = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True: signal.pause()
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def started(pod: Pod) -> float:
    at = pod.record["started_at"]
    assert isinstance(at, float)
    return at


def test_the_code_sees_the_contract_and_nothing_of_the_cluster(cluster: Cluster) -> None:
    cluster.start(SHOW, 2, plan={"workers": 2}, environment={"ADDED": "by the order"})
    assert cluster.wait() == [0, 0]
    for rank in range(4):
        seen = json.loads(cluster.log(rank))
        env = seen["env"]
        assert (env["RANK"], env["LOCAL_RANK"], env["NODE_RANK"]) == (str(rank), str(rank % 2), str(rank // 2))
        assert (env["WORLD_SIZE"], env["WORKER_PER_NODE"], env["MASTER_ADDR"]) == ("4", "2", cluster.addresses[0])
        assert (env["EPOCHS"], env["LR"], env["BATCH_SIZE"], env["BACKEND"]) == ("3", "0.1", "16", "gloo")
        assert (env["DATASETS"], env["DATASETS_PATH"], env["RUN_DIR"]) == ("mnist", "/datasets", "/trainyard/run")
        assert (env["HOME"], env["USER"], env["OF_THE_IMAGE"], env["ADDED"]) == (
            "/tmp",
            "trainyard",
            "kept",
            "by the order",
        )
        assert not [name for name in env if name.startswith(("TRAINYARD_", "KUBERNETES_"))]
        assert (seen["cwd"], seen["path"], seen["argv"]) == ("/workspace", "/workspace", ["/workspace/train.py"])
    assert (cluster.root / "run" / "tensorboard").is_dir()


def test_three_nodes_meet_although_their_names_are_known_late(cluster: Cluster) -> None:
    pods = cluster.start(MEET, 3, late_names=True)
    cluster.wait_for((cluster.root / "nodes" / "2.json").exists)
    assert not list((cluster.root / "logs").glob("rank-*"))
    cluster.publish()
    assert cluster.wait() == [0, 0, 0]
    assert {cluster.log(rank) for rank in range(3)} == {"total 3\n"}
    for pod in pods:
        record = pod.record
        assert (record["run"], record["phase"], record["exit_code"], record["causes"]) == (RUN, "ended", 0, [])
        assert record["address"] == pod.address
        assert record["started_at"] <= record["finished_at"]
    assert max(map(started, pods)) - min(map(started, pods)) < 5, "ranks start together"


def test_names_that_are_never_known_end_the_start(cluster: Cluster) -> None:
    (pod, other) = cluster.start(MEET, 2, late_names=True, start_seconds=1)
    assert cluster.wait() == [1, 1]
    assert pod.causes == other.causes == [("platform_error", "nodes_not_met")]
    assert pod.record["started_at"] is None


def test_a_node_that_does_not_come_ends_the_start(cluster: Cluster) -> None:
    (pod,) = cluster.start(MEET, 2, only=[0], start_seconds=2)
    assert pod.wait() == 1
    assert pod.causes == [("platform_error", "nodes_not_met")]
    assert pod.record["started_at"] is None


@pytest.mark.parametrize("framework", ["tensorflow", "horovod"])
def test_other_frameworks_are_told_addresses_too(cluster: Cluster, framework: str) -> None:
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


def test_a_rank_that_fails_is_the_first_cause_and_every_node_falls(cluster: Cluster) -> None:
    source = """
    import os, signal, time
    if os.environ["RANK"] == "1":
        print("about to fail")
        raise SystemExit(3)
    time.sleep(600)
    """
    pods = cluster.start(source, 2)
    assert cluster.wait() == [1, 1]
    cause = first_cause([cause for pod in pods for cause in pod.record["causes"]])
    assert cause is not None
    assert (cause["kind"], cause["node"], cause["rank"], cause["exit_code"]) == ("code_failed", 1, 1, 3)
    assert cause["last_lines"] == ["about to fail"]
    assert pods[0].record["causes"] == []


def test_a_stop_from_outside_leaves_the_grace_for_a_checkpoint(cluster: Cluster) -> None:
    pods = cluster.start(PATIENT, 2)
    for rank in range(2):
        cluster.wait_for_text("ready", rank)
    for pod in pods:
        pod.signal(signal.SIGTERM)
    assert cluster.wait() == [1, 1]
    assert [pod.causes for pod in pods] == [[("stopped", "stopped")]] * 2
    assert (cluster.root / "checkpoints" / "last").read_text() == "saved"


def test_a_stop_ends_what_ignores_it_when_the_grace_is_over(cluster: Cluster) -> None:
    (pod,) = cluster.start(DEAF, grace_seconds=1)
    cluster.wait_for_text("ready")
    pod.signal(signal.SIGTERM)
    assert pod.wait(20) == 1
    assert pod.causes == [("stopped", "stopped")]
    assert pod.record["exit_code"] is None


def test_a_sooner_end_is_heard_of_while_the_node_ends_and_only_by_a_signed_word(cluster: Cluster) -> None:
    (pod,) = cluster.start(DEAF, grace_seconds=600)
    cluster.wait_for_text("ready")
    word = cluster.root / "nodes" / STOP_FILE
    pod.signal(signal.SIGTERM)
    record = cluster.root / "nodes" / "0.json"
    cluster.wait_for(lambda: b'"stopping"' in record.read_bytes())
    for forged in (b"{}", sign_stop(RUN, 0, "guessed"), sign_stop("job-7-2", 0, KEY), record.read_bytes()):
        word.write_bytes(forged)
        beats = record.stat().st_mtime_ns
        cluster.wait_for(lambda beats=beats: record.stat().st_mtime_ns != beats)  # type: ignore[misc]
        assert pod.process.poll() is None, "it has looked a few times since"
    word.unlink()
    word.write_bytes(sign_stop(RUN, 1, KEY))
    assert pod.wait(60) == 1
    assert pod.causes == [("stopped", "stopped")]


def test_a_stop_while_the_nodes_look_for_each_other(cluster: Cluster) -> None:
    (pod,) = cluster.start(DEAF, 2, only=[1], late_names=True)
    cluster.wait_for((cluster.root / "nodes" / "1.json").exists)
    pod.signal(signal.SIGTERM)
    assert pod.wait(20) == 1
    assert pod.causes == [("stopped", "stopped")]
    assert pod.record["started_at"] is None


def test_the_deadline_is_kept_by_the_pods_own_clock(cluster: Cluster) -> None:
    (pod,) = cluster.start(DEAF, deadline_seconds=3, grace_seconds=1)
    assert pod.wait(30) == 1
    record = pod.record
    assert pod.causes == [("time_limit", "time_limit")]
    assert record["causes"][0]["data"] == {"limit_seconds": 3}
    assert record["finished_at"] - record["started_at"] < 3.5
    assert record["causes"][0]["at"] - record["started_at"] >= 1.9, "SIGTERM comes a grace before"


def test_a_hang_is_told_with_its_last_sign_and_stacks(cluster: Cluster) -> None:
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


def test_an_elastic_run_goes_on_without_a_lost_pod(cluster: Cluster) -> None:
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


def test_a_lost_pod_ends_a_run_that_needs_it(cluster: Cluster) -> None:
    pods = cluster.start(DEAF, 2)
    for rank in range(2):
        cluster.wait_for_text("ready", rank)
    pods[1].signal(signal.SIGKILL)
    assert pods[0].wait() == 1
    assert pods[0].causes == [("node_lost", "node_lost")]
    assert pods[0].record["causes"][0]["node"] == 1


def test_an_order_that_cannot_be_read_is_told(cluster: Cluster) -> None:
    cluster.image_environment = {"TRAINYARD_ORDER": "/trainyard/order/none.json"}
    (pod,) = cluster.start(SHOW)
    assert pod.wait() == 1
    assert "no order that can be read" in pod.printed()


def test_the_newest_checkpoint_is_on_record(cluster: Cluster) -> None:
    source = """
    import os
    open(os.environ["CHECKPOINT_DIR"] + "/one.pt", "w").write("x")
    """
    written = {"run": "/trainyard/run", "checkpoints": "/trainyard/checkpoints"}
    (pod,) = cluster.start(source, disk_bytes=1 << 20, written=written)
    assert pod.wait() == 0
    newest = (cluster.root / "checkpoints" / "one.pt").stat().st_mtime
    assert pod.record["checkpoint_at"] == pytest.approx(newest, abs=0.01)


def test_a_run_that_writes_more_than_its_share_is_ended(cluster: Cluster) -> None:
    source = """
    import os, time
    open(os.environ["RUN_DIR"] + "/large", "wb").write(os.urandom(3 << 20))
    print("written", flush=True)
    time.sleep(600)
    """
    (pod,) = cluster.start(source, disk_bytes=1 << 20)
    assert pod.wait() == 1
    assert pod.causes == [("disk_full", "disk_full")]


def test_a_rank_killed_for_memory_is_told_so(cluster: Cluster) -> None:
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


def test_the_platforms_own_script_runs_out_of_the_archive(cluster: Cluster) -> None:
    (pod,) = cluster.start("", builtin_script="smoke", plan={"framework": "pytorch"})
    pod.wait()
    found = json.loads((cluster.root / "run" / "check" / "rank-0.json").read_bytes())
    assert found["rank"] == 0
    assert any(finding["ok"] for finding in found["findings"])


def test_the_record_is_a_sign_of_life(cluster: Cluster) -> None:
    (pod,) = cluster.start(DEAF)
    cluster.wait_for_text("ready")
    path = cluster.root / "nodes" / "0.json"
    os.utime(path, (1, 1))
    cluster.wait_for(lambda: path.stat().st_mtime > time.time() - 60)
    pod.signal(signal.SIGTERM)


def test_files_are_left_for_the_group(cluster: Cluster) -> None:
    (pod,) = cluster.start("open('/workspace/made', 'w').write('x')")
    assert pod.wait() == 0
    for path in (cluster.root / "logs" / "rank-0.log", cluster.root / "nodes" / "0.json", cluster.workspace / "made"):
        assert path.stat().st_mode & 0o060 == 0o060, path
