"""Runs of the real archive in PID namespaces: what the code sees, how nodes connect, how a run ends."""

import json
import os
import signal

import pytest

from runtime.launcher.signed_record import STOP_FILE, sign_stop
from tests.runtime.backends.contract import MEET, STUBBORN
from tests.runtime.launcher.pods import KEY, RUN, children

pytestmark = pytest.mark.late("its pods are real processes, with time limits of seconds")

SHOW = """
    import json, os, sys
    seen = {"env": dict(os.environ), "cwd": os.getcwd(), "argv": sys.argv, "path": sys.path[0]}
    print(json.dumps(seen), flush=True)
    open("made-" + os.environ["RANK"], "w").close()
"""
DIES_WITH_THE_OTHER = """
import os, pathlib, signal, time
print("ready", flush=True)
while os.environ["RANK"] == "1": signal.pause()
while not pathlib.Path("go").exists(): time.sleep(0.01)
raise SystemExit(1)
"""


def test_nodes_connect_though_their_names_resolve_late_and_see_nothing_of_the_cluster(cluster):
    pods = cluster.start(SHOW + MEET, 2, late_names=True, plan={"workers": 2}, environment={"ADDED": "by the order"})
    cluster.wait_for((cluster.root / "nodes" / "1.json").exists)
    assert not any(map(cluster.log, range(4)))
    cluster.publish()
    assert cluster.wait() == [0, 0]
    for rank in range(4):
        first, last = cluster.log(rank).splitlines()
        seen = json.loads(first)
        env = seen["env"]
        assert (env["RANK"], env["LOCAL_RANK"], env["NODE_RANK"]) == (str(rank), str(rank % 2), str(rank // 2))
        assert (env["WORLD_SIZE"], env["WORKER_PER_NODE"], env["MASTER_ADDR"]) == ("4", "2", cluster.addresses[0])
        assert (env["EPOCHS"], env["LR"], env["BATCH_SIZE"], env["BACKEND"]) == ("3", "0.1", "16", "gloo")
        assert (env["DATASETS"], env["DATASETS_PATH"], env["RUN_DIR"]) == ("mnist", "/datasets", "/trainyard/run")
        assert (env["HOME"], env["USER"]) == ("/tmp", "trainyard")
        assert (env["OF_THE_IMAGE"], env["ADDED"]) == ("kept", "by the order")
        assert not [name for name in env if name.startswith(("TRAINYARD_", "KUBERNETES_"))]
        assert (seen["cwd"], seen["path"], seen["argv"]) == ("/workspace", "/workspace", ["/workspace/train.py"])
        assert last == "total 10"
    for pod in pods:
        record = pod.record
        assert (record["run"], record["phase"], record["exit_code"], record["causes"]) == (RUN, "ended", 0, [])
        assert record["address"] == pod.address
        assert record["started_at"] <= record["finished_at"]
    assert (cluster.root / "run" / "tensorboard").is_dir()
    for path in (cluster.root / "logs" / "rank-0.log", cluster.root / "nodes" / "0.json", cluster.workspace / "made-0"):
        assert path.stat().st_mode & 0o060 == 0o060, f"{path} can be read and written by the group"


def test_names_that_never_resolve_end_the_start(cluster):
    (pod, other) = cluster.start(MEET, 2, late_names=True, start_seconds=1)
    assert cluster.wait() == [1, 1]
    assert pod.causes == other.causes == [("platform_error", "nodes_not_met")]
    assert pod.record["started_at"] is None


def test_horovod_reaches_the_store_of_the_first_pod(cluster):
    source = """
    import os, urllib.request
    place = "http://{HOROVOD_GLOO_RENDEZVOUS_ADDR}:{HOROVOD_GLOO_RENDEZVOUS_PORT}/scope/key".format(**os.environ)
    urllib.request.urlopen(urllib.request.Request(place, data=b"value", method="PUT"))
    print(place, urllib.request.urlopen(place).read())
    """
    cluster.start(source, 2, plan={"framework": "horovod"})
    assert cluster.wait() == [0, 0]
    assert cluster.log(1).startswith(f"http://{cluster.addresses[0]}:")
    assert cluster.log(1).endswith("b'value'\n")


@pytest.mark.slow
def test_only_a_signed_request_shortens_the_grace_period(cluster):
    (pod,) = cluster.start(STUBBORN, grace_seconds=600)
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
    (pod,) = cluster.start(STUBBORN, 2, only=[1], late_names=True)
    cluster.wait_for((cluster.root / "nodes" / "1.json").exists)
    pod.signal(signal.SIGTERM)
    assert pod.wait(20) == 1
    assert pod.causes == [("stopped", "stopped")]
    assert pod.record["started_at"] is None


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


def test_two_ranks_that_die_at_once_are_both_reported(cluster):
    """The launcher of one learns of the other's death first; it still reports its own rank."""
    pods = cluster.start(DIES_WITH_THE_OTHER, 2)
    for rank in range(2):
        cluster.wait_for_text("ready", rank)
    (rank,) = children(pods[1].launcher)
    os.kill(pods[1].launcher, signal.SIGSTOP)
    os.kill(rank, signal.SIGKILL)
    (cluster.workspace / "go").touch()
    assert pods[0].wait() == 1
    os.kill(pods[1].launcher, signal.SIGCONT)
    assert pods[1].wait() == 1
    assert [(cause["rank"], cause["exit_code"]) for cause in pods[0].record["causes"]] == [(0, 1)]
    assert [(cause["rank"], cause["signal"]) for cause in pods[1].record["causes"]] == [(1, "SIGKILL")]
