"""Ranks that are forked from an interpreter that is ready: held like any other, and no run finds what another left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.specs import Outcome
from tests.runtime.backends import hostile
from tests.runtime.conftest import MAY_IMPORT_ANYTHING, Yard
from tests.runtime.images_of_ours import use_image


@pytest.fixture(params=["cold", "warm"])
def yard(yard: Yard, request: pytest.FixtureRequest) -> Yard:
    """Both ways in which ranks are started."""
    return hostile.started(yard, request.param)


def test_a_warm_rank_is_held_like_a_cold_one(tmp_path: Path, bare_images: Path) -> None:
    told = """
    import json, os, resource, signal, socket, sys
    def lines(path, *names):
        return {n: l.split(":")[1].strip() for l in open(path) for n in names if l.startswith(n + ":")}
    print(json.dumps({
        "status": lines("/proc/self/status", "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb",
                        "NoNewPrivs", "Seccomp", "Umask", "SigBlk", "SigIgn", "SigCgt", "PPid", "NSpid", "NSsid",
                        "NSpgid"),
        "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
        "group": open("/proc/self/cgroup").read(),
        "oom": open("/proc/self/oom_score_adj").read(),
        "nice": [os.nice(0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))],
        "descriptors": sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in range(50)
                              if os.path.exists(f"/proc/self/fd/{n}")),
        "environment": {n: v for n, v in os.environ.items() if n != "MASTER_PORT"},
        "place": [os.getcwd(), os.readlink("/proc/self/root"), sorted(os.listdir("/")), sys.path, sys.argv,
                  sys.executable, list(sys.flags), sys.dont_write_bytecode],
        "main": sorted(vars(sys.modules["__main__"])),
        "host": socket.gethostname(),
        "signal": str(signal.getsignal(signal.SIGINT)).split(" at ")[0],
    }, sort_keys=True))
    """
    yards = {}
    for kind in ("cold", "warm"):
        (tmp_path / kind).mkdir()
        yards[kind] = Yard(tmp_path / kind, bare_images)
        yards[kind].preface = MAY_IMPORT_ANYTHING
    hostile.warm(yards["warm"])
    try:
        for made in yards.values():
            assert made.run(told, arguments=("--depth", "3")).outcome is Outcome.COMPLETED, made.all_logs("job-1-1")
        cold, hot = (json.loads(made.log()) for made in yards.values())
        # A session is led by its own process in both; its number is what the pid happens to be.
        for status in (cold["status"], hot["status"]):
            assert status.pop("NSpid") == status.pop("NSsid") == status.pop("NSpgid")
        assert hot == cold
        assert cold["status"]["NoNewPrivs"] == "1"
        assert {cold["status"][name] for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    finally:
        for made in yards.values():
            made.backend.delete("job-1-1")
            made.backend.retire()


def test_a_warm_rank_was_warm(yard: Yard) -> None:
    """So that the tests above say what they seem to: a forked rank still bears its zygote's command line."""
    yard.run("print(open('/proc/self/cmdline').read().split(chr(0))[2].rsplit('/', 1)[-1])")
    expected = "zygote.py" if (yard.folder / "runs" / ".nursery").exists() else "rank.py"
    assert yard.log() == f"{expected}\n"


def test_nothing_of_one_run_is_seen_in_the_next(yard: Yard) -> None:
    leave = """
    import builtins, os, random, sys
    secret = "".join(reversed("drowssap-eht-si-siht"))
    kept = [secret.encode() * 1000 for _ in range(1000)]
    os.environ["LEFT"] = builtins.LEFT = secret
    sys.modules["left"] = sys
    random.seed(7)
    for folder in ("/tmp", "/dev/shm", os.environ["RUN_DIR"], os.environ["CHECKPOINT_DIR"]):
        open(folder + "/left", "w").write(secret)
    print(random.SystemRandom().random(), flush=True)
    """
    look = """
    import builtins, glob, json, os, random, re, sys
    secret = "".join(reversed("drowssap-eht-si-siht")).encode()
    parts = {secret[at:at + 8] for at in (0, 4)}
    found = 0
    with open("/proc/self/mem", "rb", 0) as memory:
        for line in open("/proc/self/maps"):
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if line.split()[1][0] != "r" or "[v" in line: continue
            memory.seek(start)
            try: found += memory.read(end - start).count(secret * 3)
            except OSError: pass
    print(json.dumps([
        found, hasattr(builtins, "LEFT"), "left" in sys.modules, "LEFT" in os.environ,
        [path for folder in ("/tmp", "/dev/shm", os.environ["RUN_DIR"], os.environ["CHECKPOINT_DIR"])
         for path in glob.glob(folder + "/left")],
    ]))
    """
    assert yard.run(leave).outcome is Outcome.COMPLETED
    assert yard.run(look, name="job-2-1").outcome is Outcome.COMPLETED, yard.all_logs("job-2-1")
    assert json.loads(yard.log(name="job-2-1")) == [0, False, False, False, []]


def test_chance_is_different_everywhere(yard: Yard) -> None:
    script = """
    import multiprocessing.process, random, tempfile, uuid
    key = multiprocessing.process.current_process().authkey
    print(random.random(), uuid.uuid4(), tempfile.mktemp(), key.hex())
    """
    seen: list[str] = []
    for name in ("job-1-1", "job-2-1"):
        yard.run(script, name=name, workers_per_node=2)
        seen += [word for rank in range(2) for word in yard.log(rank, name).split()]
    assert len(seen) == 16
    assert len(set(seen)) == 16


@pytest.mark.torch
def test_forks_of_a_zygote_share_no_memory_that_either_could_write(yard: Yard) -> None:
    """What a framework maps as shared when it is imported would be one memory of all customers."""
    script = """
    import torch
    for line in open("/proc/self/maps"):
        if line.split()[1][1:] in ("w-s", "wxs"): print(line.split()[-2:])
    print(open("/proc/self/cmdline").read().split(chr(0))[2].rsplit("/", 1)[-1])
    """
    use_image(yard, "pytorch")
    hostile.warm(yard)
    yard.run(script)
    assert yard.log() == "['/memfd:steps', '(deleted)']\nzygote.py\n", "the rank's own record of steps"
