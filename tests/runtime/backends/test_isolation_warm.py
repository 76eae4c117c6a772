"""Ranks that are forked from a prepared interpreter have the same limits as others, and see nothing of earlier runs."""

import json

import pytest

from tests.runtime.backends import hostile
from tests.runtime.conftest import MAY_IMPORT_ANYTHING, LocalHarness
from tests.runtime.images_of_ours import use_image

pytestmark = pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds")


def test_a_warm_rank_has_the_limits_of_a_cold_one(tmp_path, bare_images):
    show = """
    import json, os, resource, signal, socket, sys
    def lines(path, *names):
        return {n: l.split(":")[1].strip() for l in open(path) for n in names if l.startswith(n + ":")}
    print(json.dumps({
        "status": lines("/proc/self/status", "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb",
                        "NoNewPrivs", "Seccomp", "Seccomp_filters", "Umask", "SigBlk", "SigIgn", "SigCgt", "PPid",
                        "NSpid", "NSsid", "NSpgid"),
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
    harnesses = {}
    for kind in ("cold", "warm"):
        (tmp_path / kind).mkdir()
        harnesses[kind] = LocalHarness(tmp_path / kind, bare_images)
        harnesses[kind].preface = MAY_IMPORT_ANYTHING
    hostile.warm(harnesses["warm"])
    try:
        for each in harnesses.values():
            each.complete(show, arguments=("--depth", "3"))  # `show` prints `sys.argv` too
        cold, warm = (json.loads(each.log()) for each in harnesses.values())
        # In both, each process leads its own session. The session's number is the pid.
        for status in (cold["status"], warm["status"]):
            assert status.pop("NSpid") == status.pop("NSsid") == status.pop("NSpgid")
        assert warm == cold
        assert (cold["status"]["Uid"], cold["host"]) == ("1000\t1000\t1000\t1000", "job-1-1-0")
        # Seccomp 2: a filter is active.
        assert [cold["status"][name] for name in ("NoNewPrivs", "Seccomp", "Seccomp_filters")] == ["1", "2", "1"]
        assert {cold["status"][name] for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    finally:
        for each in harnesses.values():
            each.backend.delete("job-1-1")
            each.backend.stop_prepared_processes()


def test_nothing_of_one_run_is_seen_in_the_next(harness):
    hostile.warm(harness)
    leave = """
    import builtins, os, random, sys
    secret = "".join(reversed("drowssap-eht-si-siht"))  # reversed: the scripts' own texts must not contain it
    kept = [secret.encode() * 1000 for _ in range(1000)]
    os.environ["LEFT"] = builtins.LEFT = secret
    sys.modules["left"] = sys
    random.seed(7)
    for folder in ("/tmp", "/dev/shm", *(os.environ[name] for name in ("RUN_DIR", "CHECKPOINT_DIR", "OUTPUT_DIR"))):
        open(folder + "/left", "w").write(secret)
    print(random.SystemRandom().random(), flush=True)
    """
    look = """
    import builtins, glob, json, os, random, re, sys
    secret = "".join(reversed("drowssap-eht-si-siht")).encode()
    copies = 0
    with open("/proc/self/mem", "rb", 0) as memory:
        for line in open("/proc/self/maps"):
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if line.split()[1][0] != "r" or "[v" in line: continue  # not readable, or the kernel's ([vdso], [vvar])
            memory.seek(start)
            try: copies += memory.read(end - start).count(secret * 3)  # `kept` has it many times in a row
            except OSError: pass
    print(json.dumps({
        "program": open("/proc/self/cmdline").read().split(chr(0))[2].rsplit("/", 1)[-1],
        "copies": copies,
        "names": [hasattr(builtins, "LEFT"), "left" in sys.modules, "LEFT" in os.environ],
        "files": [path for folder in
                  ("/tmp", "/dev/shm", *(os.environ[name] for name in ("RUN_DIR", "CHECKPOINT_DIR", "OUTPUT_DIR")))
                  for path in glob.glob(folder + "/left")],
    }))
    """
    harness.complete(leave)
    harness.complete(look, name="job-2-1")
    assert json.loads(harness.log(name="job-2-1")) == {
        "program": "forkserver.py", "copies": 0, "names": [False] * 3, "files": [],
    }  # fmt: skip


@pytest.mark.slow
def test_random_values_differ_in_every_rank(harness):
    hostile.warm(harness)
    script = """
    import multiprocessing.process, random, tempfile, uuid
    key = multiprocessing.process.current_process().authkey
    print(random.random(), uuid.uuid4(), tempfile.mktemp(), key.hex())
    """
    harness.complete(script, workers_per_node=3)
    values = [word for rank in range(3) for word in harness.log(rank).split()]
    assert len(values) == len(set(values)) == 12, "four values of each rank"


@pytest.mark.slow
@pytest.mark.torch
def test_forks_of_a_fork_server_share_no_writable_memory(harness):
    """Memory that a framework maps as shared when it is imported would be shared by all customers."""
    script = """
    import torch
    for line in open("/proc/self/maps"):
        if line.split()[1][1:] in ("w-s", "wxs"): print(line.split()[-2:])
    print(open("/proc/self/cmdline").read().split(chr(0))[2].rsplit("/", 1)[-1])
    """
    use_image(harness, "pytorch")
    hostile.warm(harness)
    harness.run(script)
    assert harness.log() == "['/memfd:steps', '(deleted)']\nforkserver.py\n", "only the rank's own file of steps"
