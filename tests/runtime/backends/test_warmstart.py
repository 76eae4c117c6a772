"""What is kept ready may die at any moment, and nothing but speed is lost."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from runtime.backends import identity, warmstart
from runtime.specs import Outcome
from tests.console.processes import wait_for
from tests.runtime.conftest import MAY_IMPORT_ANYTHING, Yard

PLAIN = "print(open('/proc/self/cmdline').read().split(chr(0))[2].rsplit('/', 1)[-1], flush=True)\n"
HOW = MAY_IMPORT_ANYTHING + PLAIN
WAIT = HOW + "import signal\nsignal.pause()\n"


@pytest.fixture
def warm(yard: Yard) -> Yard:
    """A yard with a nursery, and a zygote of its image in it."""
    yard.backend = yard.another(warm_seconds=600)
    image = yard.spec().image
    yard.backend.prepare(image)
    wait_for(lambda: yard.backend.is_prepared(image), 30)
    return yard


def nursery(yard: Yard) -> int:
    return int(json.loads((yard.folder / "runs" / ".nursery" / "nursery.json").read_bytes())["pid"])


def zygotes(yard: Yard) -> list[int]:
    pid = nursery(yard)
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def end(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid, number)
    wait_for(lambda: identity.start_time(pid) is None, 10)


def test_ranks_of_all_nodes_are_forked(warm: Yard) -> None:
    assert warm.run(HOW, nodes=2, workers_per_node=2).outcome is Outcome.COMPLETED
    assert [warm.log(rank) for rank in range(4)] == ["zygote.py\n"] * 4


def test_the_first_run_is_cold_and_has_the_next_ones_made_ready(yard: Yard) -> None:
    yard.backend = yard.another(warm_seconds=600)
    yard.run(HOW)
    assert yard.log() == "rank.py\n"
    wait_for(lambda: yard.backend.is_prepared(yard.spec().image), 30)
    yard.run(HOW, name="job-2-1")
    assert yard.log(name="job-2-1") == "zygote.py\n"


def test_a_killed_nursery_takes_its_zygotes_along_and_no_run(warm: Yard) -> None:
    warm.backend.submit(warm.spec(WAIT, name="job-2-1"))
    warm.wait_for_text("zygote.py", "job-2-1")
    kept = zygotes(warm)
    assert kept
    end(nursery(warm))
    for pid in kept:
        wait_for(lambda pid=pid: identity.start_time(pid) is None, 10)
    assert warm.run(HOW).outcome is Outcome.COMPLETED
    assert warm.log() == "rank.py\n"
    assert warm.backend.describe("job-2-1").outcome is None
    wait_for(lambda: warm.backend.is_prepared(warm.spec().image), 30)


def test_a_killed_zygote_is_a_cold_start(warm: Yard) -> None:
    end(zygotes(warm)[0])
    assert warm.run(HOW, workers_per_node=2).outcome is Outcome.COMPLETED
    assert [warm.log(rank) for rank in range(2)] == ["rank.py\n"] * 2


@pytest.mark.parametrize(("who", "how"), [("nursery", "zygote.py"), ("zygote", "rank.py")])
def test_who_stands_still_is_not_waited_for(warm: Yard, who: str, how: str) -> None:
    pid = nursery(warm) if who == "nursery" else zygotes(warm)[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert warm.run(HOW).outcome is Outcome.COMPLETED
        assert warm.log() == f"{how}\n"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert len(warm.records()) == 1
    assert warm.run(HOW, name="job-2-1").outcome is Outcome.COMPLETED


def test_a_module_of_the_scripts_own_comes_before_the_images(warm: Yard) -> None:
    (warm.workspace / "json").mkdir()
    (warm.workspace / "json" / "__init__.py").write_text("WHOSE = 'mine'\n")
    assert warm.run(HOW + "import json\nprint(json.WHOSE)").outcome is Outcome.COMPLETED, warm.all_logs("job-1-1")
    assert warm.log() == "rank.py\nmine\n"


@pytest.mark.parametrize(
    ("line", "how"),
    [
        ("import os; os.environ['OMP_NUM_THREADS'] = '3'", "rank.py"),
        ("import os; os.environ.setdefault('TORCH_LOGS', 'all')", "rank.py"),
        ("import os\nfor name in ('OMP_NUM_THREADS',): os.environ[name] = '3'", "rank.py"),
        ("import os; names = {'OMP_NUM_THREADS': '3'}; os.environ.update( names)", "rank.py"),
        ("import os; name = 'OMP_NUM_THREADS'; os.environ.update({ name: '3'})", "rank.py"),
        ("import os; os.environ['MY_NAME'] = '3'", "zygote.py"),
        ("import os; os.environ.update({'MY_NAME': '3'})", "zygote.py"),
        ("import os; print(end='' if [os.environ[name] == '3' for name in ('HOME',)] else '?')", "zygote.py"),
    ],
)
def test_who_settles_what_frameworks_read_at_their_start_is_started_cold(warm: Yard, line: str, how: str) -> None:
    warm.run(f"{line}\n{HOW}")
    assert warm.log() == f"{how}\n"


@pytest.mark.parametrize(
    ("source", "of_use"),
    [
        ("print(1)\n", False),
        ("import os, sys as s\nfrom pathlib import Path\n", False),
        ("import os\nimport torch.nn as nn\n", True),
        ("if True:\n    from torch import nn\n", True),
        ("import plain\n", False),
        ("from .plain import x\n", False),
        ("import hidden\n", True),
        ("import linked\n", True),
        ("import package\n", True),
        ("import importlib\n", True),
        ("__import__('to' + 'rch')\n", True),
        ("import sys\nsys.path.append('lib')\n", True),
    ],
)
def test_warm_ranks_are_for_scripts_that_may_import_a_framework(tmp_path: Path, source: str, of_use: bool) -> None:
    folder = tmp_path / "experiments" / "first"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(source)
    (folder / "plain.py").write_text("import json\n")
    (folder / "hidden.py").write_text("import plain\nimport torch\n")
    (folder / "linked.py").symlink_to("plain.py")
    (folder / "package").mkdir()
    assert warmstart.is_of_use(tmp_path, "experiments/first/train.py") is of_use


def test_what_is_no_plain_file_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "train.py").write_text("print(1)\n")
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(tmp_path / "workspace" / "pipe.py")
    (tmp_path / "workspace" / "long.py").write_text("# " + "x" * (1 << 20))
    assert all(
        warmstart.is_of_use(tmp_path / "workspace", script)
        for script in ("link/train.py", "pipe.py", "long.py", "missing.py", "no/folder.py")
    )
    assert warmstart.is_of_use(tmp_path / "nowhere", "train.py")


def test_a_script_of_the_standard_library_alone_gets_an_interpreter_without_the_frameworks(warm: Yard) -> None:
    assert warm.run(PLAIN + "import sys\nprint('torch' in sys.modules)\n").outcome is Outcome.COMPLETED
    assert warm.log() == "zygote.py\nFalse\n"
    (warm.workspace / "other.py").write_text("import no_module_of_pythons_own\n")
    warm.run(PLAIN + "if False:\n    import other\n", name="job-2-1")
    assert warm.log(name="job-2-1") == "zygote.py\n"


LEAVES = """
import atexit, os, sys, threading, weakref
with open(__file__) as file:
    file.read()
unclosed = open(os.environ["RUN_DIR"] + "/unclosed", "w")
unclosed.write("kept")
class Keeper:
    held = open(os.environ["RUN_DIR"] + "/held", "w")
    def __del__(self):
        print("destroyed", flush=True)
sys.keeps_it = Keeper.held
Keeper.held.write("kept as well")
one = Keeper()
class Loop:
    def __del__(self):
        print("collected", flush=True)
loop = Loop()
loop.itself = loop
def generator():
    try:
        yield 1
    finally:
        print("generator closed", flush=True)
running = generator()
next(running)
atexit.register(print, "exit handler", flush=True)
weakref.finalize(one, print, "finalizer", flush=True)
import time
def work():
    threading.main_thread().join()
    print("thread", flush=True)
threading.Thread(target=work).start()
if sys.stdout.isatty():
    raise SystemExit(3)
ENDING
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("print('last')", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("threading.Thread(target=time.sleep, args=(600,), daemon=True).start()", 0),
        ("sys.stdout.write('no newline')", 0),
        ("sys.stdout = None", 0),
    ],
)
def test_a_plain_script_ends_as_in_an_interpreter_of_its_own(warm: Yard, yard: Yard, ending: str, code: int) -> None:
    script = LEAVES.replace("ENDING", ending)
    for backend, name in ((warm.backend, "job-1-1"), (yard.another(warm_seconds=0), "job-2-1")):
        yard.backend = backend
        yard.run(script, name=name)
    told = {}
    for name in ("job-1-1", "job-2-1"):
        written = yard.backend.run_folder(name) / "run"
        node = yard.backend.describe(name).nodes[0]
        kept = [(written / file).read_text() for file in ("unclosed", "held")]
        told[name] = (sorted(yard.log(name=name).split()), kept, node.exit_code)
        assert kept == ["kept", "kept as well"]
    assert told["job-1-1"] == told["job-2-1"]
    assert told["job-1-1"][2] == (1 if code else 0)


def test_another_version_of_the_code_sends_the_nursery_away(warm: Yard) -> None:
    before = nursery(warm)
    other = warm.another(warm_seconds=600)
    other._keeper._version = "another"
    warm.backend = other
    warm.run(HOW)
    assert warm.log() == "rank.py\n"
    wait_for(lambda: other.is_prepared(warm.spec().image) and nursery(warm) != before, 30)
    warm.run(HOW, name="job-2-1")
    assert warm.log(name="job-2-1") == "zygote.py\n"


def test_an_idle_nursery_goes_by_itself(yard: Yard) -> None:
    yard.backend = yard.another(warm_seconds=1.5)
    yard.run(HOW)
    folder = yard.folder / "runs" / ".nursery"
    wait_for((folder / "nursery.json").exists, 20)
    pid = nursery(yard)
    wait_for(lambda: identity.start_time(pid) is None, 20)
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "log"]


def test_a_zygote_that_cannot_import_is_no_zygote(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.backends.recipes.preloads", lambda _name: ["no_such_module"])
    yard.backend = yard.another(warm_seconds=600)
    yard.backend.prepare(yard.spec().image)
    log = yard.folder / "runs" / ".nursery" / "log"
    wait_for(lambda: log.exists() and "no_such_module" in log.read_text(), 30)
    assert not yard.backend.is_prepared(yard.spec().image)
    yard.run(HOW)
    assert yard.log() == "rank.py\n"
