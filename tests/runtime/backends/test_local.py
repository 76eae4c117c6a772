"""The life of a local run: what the code sees, what is kept of what it says, and how it ends when all goes well."""

from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING

import pytest

from runtime.backends.runs import Run
from runtime.errors import InvalidSpec, NoCapacity, RunNotFound
from runtime.specs import Framework, Mount, Outcome, Resources, RunPhase

if TYPE_CHECKING:
    from tests.runtime.conftest import Yard

SHOW_ENVIRONMENT = """
    import json, os, sys
    print(json.dumps({"environment": dict(os.environ), "argv": sys.argv, "cwd": os.getcwd(), "path": sys.path[0]}))
"""
SLEEP = """
    import signal
    print("ready")
    signal.pause()
"""


@pytest.mark.parametrize(("nodes", "workers"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_every_rank_sees_the_whole_contract(yard: Yard, nodes: int, workers: int) -> None:
    status = yard.run(
        SHOW_ENVIRONMENT, nodes=nodes, workers_per_node=workers, epochs=7, lr="0.05", batch_size=48, restart_count=2
    )
    assert status.outcome is Outcome.COMPLETED
    master_ports = set()
    for rank in range(nodes * workers):
        seen = json.loads(yard.log(rank))
        environment = seen["environment"]
        node, local_rank = divmod(rank, workers)
        expected = {
            "DATASETS_PATH": "/datasets",
            "DATASETS": "digits",
            "WORKSPACE": "/workspace",
            "EPOCHS": "7",
            "LR": "0.05",
            "BATCH_SIZE": "48",
            "BACKEND": "gloo",
            "MASTER_ADDR": "127.0.0.1",
            "WORLD_SIZE": str(nodes * workers),
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "NODE_RANK": str(node),
            "WORKER_PER_NODE": str(workers),
            "LOCAL_WORLD_SIZE": str(workers),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(nodes),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(nodes * workers),
            "TORCHELASTIC_RUN_ID": "job-1-1",
            "RESTART_COUNT": "2",
            "OMP_NUM_THREADS": "1",
            "RUN_DIR": "/trainyard/run",
            "METRICS_FILE": "/trainyard/run/metrics.jsonl",
            "TENSORBOARD_LOGDIR": "/trainyard/run/tensorboard",
            "CHECKPOINT_DIR": "/trainyard/checkpoints",
        }
        assert {name: environment.get(name) for name in expected} == expected
        assert seen["argv"] == ["/workspace/train.py"]
        assert seen["cwd"] == seen["path"] == "/workspace"
        master_ports.add(environment["MASTER_PORT"])
    assert len(master_ports) == 1


def test_nothing_of_the_host_is_in_the_environment(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DJANGO_SECRET_KEY", "of-the-console")
    yard.run(SHOW_ENVIRONMENT)
    assert "of-the-console" not in yard.log()
    assert "DJANGO_SECRET_KEY" not in yard.log()


@pytest.mark.parametrize(
    ("declared", "given"),
    [
        ("parser.add_argument('--local_rank', type=int, required=True)", "--local_rank=1"),
        ("parser.add_argument('--local-rank', type=int, required=True)", "--local-rank=1"),
        ("parser.add_argument('--rank')", None),
    ],
)
def test_the_local_rank_flag_is_given_in_the_spelling_that_is_declared(
    yard: Yard, declared: str, given: str | None
) -> None:
    script = f"""
    import argparse, sys
    parser = argparse.ArgumentParser()
    {declared}
    parser.add_argument("--depth")
    parser.parse_args()
    print(sys.argv[1:])
    """
    status = yard.run(script, workers_per_node=2, arguments=("--depth", "3"))
    assert status.outcome is Outcome.COMPLETED
    assert yard.log(1) == f"{['--depth', '3', *([given] if given else [])]}\n"


def test_a_parser_in_a_module_beside_the_script_counts(yard: Yard) -> None:
    (yard.workspace / "options.py").write_text("def add(parser): parser.add_argument('--local_rank', required=True)\n")
    yard.run("import options, sys\nprint(sys.argv[1:])")
    assert yard.log() == "['--local_rank=0']\n"


def test_the_script_is_main_in_a_plain_interpreter(yard: Yard) -> None:
    (yard.workspace / "deep").mkdir()
    (yard.workspace / "deep" / "beside.py").write_text("NAME = 'beside'\n")
    (yard.workspace / "deep" / "main.py").write_text(
        "import sys, beside, os\n"
        "me = sys.modules['__main__']\n"
        "print(__name__, __file__, me.__dict__ is globals(), __doc__, beside.NAME, os.getcwd(), 'run' in globals())\n"
    )
    yard.run("", script="deep/main.py")
    assert yard.log() == "__main__ /workspace/deep/main.py True None beside /workspace/deep False\n"


def test_a_traceback_shows_the_script_alone(yard: Yard) -> None:
    status = yard.run("def f():\n    raise ValueError('no')\nf()\n")
    assert status.outcome is Outcome.CODE_FAILED
    assert yard.log().splitlines()[1].strip() == 'File "/workspace/train.py", line 3, in <module>'
    assert status.failure is not None
    assert status.failure.last_lines[-1] == "ValueError: no"


def test_times_and_phases_of_a_run(yard: Yard) -> None:
    yard.backend.submit(yard.spec(SLEEP, nodes=2))
    status = yard.wait_for_text("ready")
    status = yard.wait("job-1-1", lambda status: status.phase is RunPhase.RUNNING)
    assert status.submitted_at is not None
    assert status.started_at is not None
    assert status.submitted_at < status.started_at
    assert status.finished_at is None
    yard.backend.stop("job-1-1", 0)
    status = yard.wait_for_end()
    assert status.finished_at is not None
    assert status.started_at is not None
    assert status.finished_at >= status.started_at
    assert [node.phase for node in status.nodes] == [RunPhase.ENDED] * 2


def test_what_is_written_lies_in_the_run_folder(yard: Yard) -> None:
    yard.run("import os\nopen(os.environ['METRICS_FILE'], 'w').write('{}')\nopen('result', 'w').write('kept')\n")
    assert (yard.backend.run_folder("job-1-1") / "run" / "metrics.jsonl").read_text() == "{}"
    assert (yard.workspace / "result").read_text() == "kept"


def test_attempts_with_one_key_share_their_checkpoints(yard: Yard) -> None:
    path = "os.path.join(os.environ['CHECKPOINT_DIR'], 'state')"
    yard.run(f"import os\nopen({path}, 'w').write('epoch 3')", checkpoint_key="job-1")
    yard.backend.delete("job-1-1")
    yard.run(f"import os\nprint(open({path}).read())", checkpoint_key="job-1", name="job-1-2")
    assert yard.log(name="job-1-2") == "epoch 3\n"
    yard.run("import os\nprint(os.listdir(os.environ['CHECKPOINT_DIR']))", name="job-2-1")
    assert yard.log(name="job-2-1") == "[]\n"
    yard.backend.delete_checkpoints("job-1")
    yard.run("import os\nprint(os.listdir(os.environ['CHECKPOINT_DIR']))", checkpoint_key="job-1", name="job-1-3")
    assert yard.log(name="job-1-3") == "[]\n"


def test_a_second_submit_adopts_the_first(yard: Yard) -> None:
    spec = yard.spec("import os\nopen(os.path.join(os.environ['RUN_DIR'], 'starts'), 'a').write('x')")
    backends = [yard.another() for _ in range(4)]
    threads = [threading.Thread(target=backend.submit, args=(spec,)) for backend in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yard.wait_for_end()
    yard.backend.submit(spec)
    assert yard.wait_for_end().outcome is Outcome.COMPLETED
    assert (yard.backend.run_folder("job-1-1") / "run" / "starts").read_text() == "x"


def test_a_half_made_submission_is_no_run_and_is_healed(yard: Yard) -> None:
    spec = yard.spec()
    yard.backend.submit(spec)
    yard.wait_for_end()
    (yard.backend.run_folder("job-1-1") / "submission.json").unlink()
    with pytest.raises(RunNotFound):
        yard.backend.describe("job-1-1")
    assert yard.backend.names() == ["job-1-1"]
    yard.backend.submit(spec)
    assert yard.wait_for_end().outcome is Outcome.COMPLETED


def test_supervisors_of_a_submitter_that_died_start_nothing(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "record", die)
    with pytest.raises(KeyboardInterrupt):
        yard.backend.submit(yard.spec("print('must not run')", nodes=2))
    assert yard.backend.names() == []
    assert yard.backend.capacity().machines[0].free.cpus == 64


def test_concurrent_submits_never_overbook(yard: Yard) -> None:
    refused = []

    def submit(number: int) -> None:
        try:
            yard.another(cpus=3).submit(yard.spec(SLEEP, name=f"job-{number}-1"))
        except NoCapacity:
            refused.append(number)

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 3
    assert len(yard.backend.names()) == 3
    small = yard.another(cpus=3)
    assert small.capacity().machines[0].free.cpus == 0
    yard.backend.delete(yard.backend.names()[0])
    assert small.capacity().machines[0].free.cpus == 1


def test_an_ended_run_gives_its_room_back(yard: Yard) -> None:
    yard.run("", resources=Resources(cpus=40, memory_mib=1024))
    assert yard.run("", name="job-2-1", resources=Resources(cpus=40, memory_mib=1024)).outcome is Outcome.COMPLETED
    assert yard.backend.capacity().machines[0].free == yard.backend.capacity().machines[0].total


def test_what_can_never_fit_is_invalid(yard: Yard) -> None:
    with pytest.raises(InvalidSpec, match="room for 32") as caught:
        yard.backend.submit(yard.spec(nodes=33, resources=Resources(cpus=2, memory_mib=64)))
    assert caught.value.field == "nodes"
    assert yard.backend.names() == []


def test_logs_come_in_pieces_at_character_boundaries(yard: Yard) -> None:
    yard.run("import sys\nsys.stdout.buffer.write('é€😀'.encode() * 50)")
    pieces, offset = [], 0
    while True:
        chunk = yard.backend.logs("job-1-1", 0, offset, limit=7)
        pieces.append(chunk.text)
        offset = chunk.next_offset
        if chunk.eof:
            break
    assert "".join(pieces) == "é€😀" * 50


def test_eof_comes_only_with_the_end(yard: Yard) -> None:
    yard.backend.submit(yard.spec(SLEEP))
    yard.wait_for_text("ready\n")
    chunk = yard.backend.logs("job-1-1", 0, 0)
    assert (chunk.text, chunk.next_offset, chunk.eof) == ("ready\n", 6, False)
    yard.backend.stop("job-1-1", 0)
    yard.wait_for_end()
    assert yard.backend.logs("job-1-1", 0, 6).eof
    with pytest.raises(RunNotFound):
        yard.backend.logs("job-1-1", 1)


def test_a_log_is_capped_and_the_run_goes_on(yard: Yard) -> None:
    script = "for _ in range(3000): print('x' * 1000)\nopen('done', 'w').close()"
    status = yard.run(script, log_limit_bytes=10_000)
    assert status.outcome is Outcome.COMPLETED
    assert (yard.workspace / "done").exists()
    log = yard.log()
    assert len(log) < 10_500
    assert "has reached its limit of 10000 bytes" in log


@pytest.mark.parametrize(
    "script",
    [
        "import sys; sys.stdout.buffer.write(bytes(range(256)) * 100)",
        "import os; print('before'); os.close(1); os.close(2)",
        "import os; os.closerange(0, 256)",
        "import os\nif os.fork() == 0:\n    os.setsid()\n    import signal; signal.pause()",
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))",
    ],
    ids=["binary", "closed", "all closed", "daemon", "limits"],
)
def test_odd_but_successful_code_completes(yard: Yard, script: str) -> None:
    assert yard.run(script, workers_per_node=2).outcome is Outcome.COMPLETED


def test_tensorflow_ports_are_free_and_different(yard: Yard) -> None:
    script = """
    import json, os, socket
    config = json.loads(os.environ["TF_CONFIG"])
    host, port = config["cluster"]["worker"][config["task"]["index"]].split(":")
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, int(port)))
        server.listen()
    print(len(set(config["cluster"]["worker"])))
    """
    status = yard.run(script, nodes=2, workers_per_node=2, framework=Framework.TENSORFLOW)
    assert status.outcome is Outcome.COMPLETED, yard.all_logs("job-1-1")
    assert yard.log(3) == "4\n"


def test_horovods_ranks_meet_at_the_key_value_server(yard: Yard) -> None:
    script = """
    import os, time, urllib.error, urllib.request
    server = "http://{HOROVOD_GLOO_RENDEZVOUS_ADDR}:{HOROVOD_GLOO_RENDEZVOUS_PORT}/scope/".format(**os.environ)
    rank, size = os.environ["HOROVOD_RANK"], int(os.environ["HOROVOD_SIZE"])
    urllib.request.urlopen(urllib.request.Request(server + rank, method="PUT", data=rank.encode())).close()
    found = set()
    while len(found) < size:
        for other in map(str, range(size)):
            try:
                with urllib.request.urlopen(server + other) as answer:
                    found.add(answer.read())
            except urllib.error.HTTPError as error:
                error.close()
    """
    status = yard.run(script, nodes=2, workers_per_node=2, framework=Framework.HOROVOD)
    assert status.outcome is Outcome.COMPLETED, yard.all_logs("job-1-1")


def test_changes_tell_of_output_and_end(yard: Yard) -> None:
    seen: set[str] = set()
    yard.backend.submit(yard.spec("print('x')"))
    for names in yard.backend.changes(stop_after=20):
        seen |= names
        if yard.backend.describe("job-1-1").phase is RunPhase.ENDED:
            break
    yard.backend.submit(yard.spec("print('x')", name="job-2-1"))
    for names in yard.backend.changes(stop_after=20):
        seen |= names
        if "job-2-1" in seen:
            break
    assert "job-2-1" in seen


def test_unknown_runs(yard: Yard) -> None:
    yard.backend.stop("nobody", 1)
    yard.backend.delete("nobody")
    with pytest.raises(RunNotFound):
        yard.backend.describe("nobody")
    with pytest.raises(RunNotFound):
        yard.backend.describe("../elsewhere")


def test_delete_follows_no_link_and_opens_locked_folders(yard: Yard) -> None:
    outside = yard.folder / "outside"
    outside.mkdir()
    (outside / "precious").write_text("kept")
    script = f"""
    import os
    os.chdir(os.environ["RUN_DIR"])
    os.symlink({str(outside)!r}, "link")
    os.makedirs("locked/inner")
    open("locked/inner/file", "w").close()
    os.chmod("locked/inner", 0)
    os.chmod("locked", 0)
    """
    assert yard.run(script).outcome is Outcome.COMPLETED
    folder = yard.backend.run_folder("job-1-1")
    yard.backend.delete("job-1-1")
    assert not os.path.lexists(folder)
    assert (outside / "precious").read_text() == "kept"


def test_a_mount_below_another_is_seen(yard: Yard) -> None:
    inner = yard.folder / "inner"
    inner.mkdir()
    (inner / "file").write_text("seen")
    (yard.dataset / "sub").mkdir()
    mounts = (*yard.spec().mounts, Mount(str(inner), "/datasets/digits/sub"))
    yard.run("print(open('/datasets/digits/sub/file').read())", mounts=mounts)
    assert yard.log() == "seen\n"


def test_samples_come_in_whole_lines(yard: Yard) -> None:
    yard.backend.submit(yard.spec(SLEEP, hang_seconds=0))
    yard.wait_for_text("ready")
    path = yard.backend.run_folder("job-1-1") / "nodes" / "1.samples.jsonl"
    with pytest.raises(RunNotFound):
        yard.backend.samples("job-1-1", 1)
    path = path.with_name("0.samples.jsonl")
    yard.backend.stop("job-1-1", 0)
    yard.wait_for_end()
    path.write_text('{"at": 1}\n{"at": 22}\n{"at"')
    chunk = yard.backend.samples("job-1-1", 0, 0, limit=15)
    assert (chunk.text, chunk.next_offset, chunk.eof) == ('{"at": 1}\n', 10, False)
    chunk = yard.backend.samples("job-1-1", 0, 10, limit=3)
    assert chunk.text == '{"at": 22}\n'
    assert yard.backend.samples("job-1-1", 0, 21).text == ""
    path.unlink()
    assert yard.backend.samples("job-1-1", 0).eof


def test_stacks_are_those_of_a_hang(yard: Yard) -> None:
    yard.run("print('x')")
    assert yard.backend.stacks("job-1-1") == {}
    (yard.backend.run_folder("job-1-1") / "logs" / "stacks-1.txt").write_text("one")
    (yard.backend.run_folder("job-1-1") / "logs" / "stacks-0.txt").write_text("zero")
    assert list(yard.backend.stacks("job-1-1").items()) == [(0, "zero"), (1, "one")]
    with pytest.raises(RunNotFound):
        yard.backend.stacks("job-2-1")


def test_progress_and_checkpoints_are_seen_in_the_status(yard: Yard) -> None:
    script = """
    import os, signal, time
    print("ready", flush=True)
    with open(os.path.join(os.environ["CHECKPOINT_DIR"], "state"), "w") as file: file.write("x")
    os.symlink("/etc/passwd", os.path.join(os.environ["CHECKPOINT_DIR"], "link"))
    """
    status = yard.run(script)
    assert status.started_at is not None
    assert status.progress_at is not None
    assert status.checkpoint_at is not None
    assert status.started_at <= status.progress_at
    made = (yard.backend.run_folder("job-1-1") / "checkpoints" / "state").stat().st_mtime
    assert status.checkpoint_at == made
    assert [span.nodes for span in status.spans] == [1]
