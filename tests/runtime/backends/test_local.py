"""What only local runs have, beside what every backend keeps (`test_contract_backends.py`, `test_contract_ends.py`)."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from runtime.backends.runs import Run
from runtime.errors import NoCapacity, RunNotFound
from runtime.launcher import disk
from runtime.specs import Framework, Mount, Outcome

if TYPE_CHECKING:
    from tests.runtime.conftest import Yard

SHOW_ENVIRONMENT = """
    import json, os, sys
    print(json.dumps({"environment": dict(os.environ), "argv": sys.argv, "cwd": os.getcwd(), "path": sys.path[0]}))
"""
STUBBORN = """
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        signal.pause()
"""
SLEEP = """
    import signal
    print("ready")
    signal.pause()
"""


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


def test_a_parser_in_a_script_that_the_script_runs_counts(yard: Yard) -> None:
    (yard.workspace / "old.py").write_text(
        "import argparse\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--local_rank', type=int, required=True)\n"
        "print('given', parser.parse_args().local_rank)\n"
    )
    runner = "import runpy, sys\ndel sys.argv[0]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    status = yard.run(runner, workers_per_node=2, arguments=("old.py",))
    assert status.outcome is Outcome.COMPLETED, yard.all_logs("job-1-1")
    assert yard.log(1) == "given 1\n"


def test_a_script_that_is_named_and_not_run_declares_nothing(yard: Yard) -> None:
    (yard.workspace / "old.py").write_text("parser.add_argument('--local_rank')\n")
    yard.run("import sys\nprint(sys.argv[1:])", arguments=("old.py",))
    assert yard.log() == "['old.py']\n"


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


def test_no_run_begins_on_a_disk_without_room(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a run finds there is the most that it may write, and who writes more pays."""
    left = disk.RESERVE_BYTES + (1 << 30)
    monkeypatch.setattr(disk, "free_bytes", lambda _folder: left - 1)
    spec = yard.spec("print('ran')")
    for _again in range(2):
        with pytest.raises(NoCapacity):
            yard.backend.submit(spec)
    assert yard.backend.names() == []
    capacity = yard.backend.capacity()
    assert (capacity.nodes_now(spec.resources), capacity.nodes_ever(spec.resources) > 0) == (0, True)
    assert caplog.text.count("1279 MiB are free on its disk") == 1
    monkeypatch.setattr(disk, "free_bytes", lambda _folder: left)
    yard.backend.submit(spec)
    assert yard.wait_for_end().outcome is Outcome.COMPLETED


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


def test_a_name_leads_nowhere_else(yard: Yard) -> None:
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


def test_an_end_that_is_to_come_sooner_stays_though_nobody_had_read_of_it_yet(yard: Yard) -> None:
    yard.backend.submit(yard.spec(STUBBORN, grace_seconds=600, deadline_seconds=3600))
    yard.wait_for_text("ready")
    supervisor = yard.records("job-1-1")[0]["pid"]
    os.kill(supervisor, signal.SIGSTOP)
    yard.backend.stop("job-1-1", 1)
    yard.backend.stop("job-1-1", 600)
    os.kill(supervisor, signal.SIGCONT)
    assert yard.wait_for_end().outcome is Outcome.STOPPED


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
