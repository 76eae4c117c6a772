"""Decisions of the Slurm backend, without Slurm: settings, capacity, arguments of sbatch, waiting, and why runs end."""

import dataclasses
import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime.backends.slurm import evidence, submission
from runtime.backends.slurm.backend import SlurmBackend, _translate_sbatch_error
from runtime.backends.slurm.capacity import compute_capacity
from runtime.backends.slurm.commands import CommandFailed, Slurm
from runtime.backends.slurm.config import SlurmConfig
from runtime.backends.slurm.evidence import EndRequest, Observation
from runtime.backends.slurm.pending import explain_waiting
from runtime.backends.slurm.runs import SlurmRun
from runtime.backends.slurm.states import SlurmJob, has_preemption_time, parse_jobs, parse_machines
from runtime.backends.supervision.outcome import merge
from runtime.errors import BackendUnavailable, InvalidSpec, NoCapacity, RunNotFound, RunUnreadable
from runtime.files import write_json
from runtime.specs import FailureCode, Framework, Image, Outcome, Resources, RunPhase, RunSpec, WaitingCode

CONFIG = {
    "backend": "slurm",
    "account": "everybody",
    "accounts": {"acme": "acme-lab"},
    "gpu_types": {"a100": "NVIDIA-A100"},
    "node_types": {
        "": {"partition": "cpu"},
        "gpu": {"partition": "gpu", "constraint": "nvlink&rack1", "qos": "high", "gpu": "a100"},
    },
}
MACHINES = """
NodeName=c0 CPUAlloc=2 CPUEfctv=30 CPUTot=32 ActiveFeatures=(null) RealMemory=64000 AllocMem=4000 MemSpecLimit=1000 State=MIXED Partitions=cpu CfgTRES=cpu=30,mem=63000M,billing=30 AllocTRES=cpu=2,mem=4000M
NodeName=c1 CPUAlloc=0 CPUTot=32 RealMemory=64000 AllocMem=0 State=IDLE+DRAIN Partitions=cpu CfgTRES=cpu=32 AllocTRES= Reason=State=IDLE soon [root@2026]
NodeName=c2 CPUAlloc=0 CPUTot=32 RealMemory=64000 AllocMem=0 State=DOWN* Partitions=cpu CfgTRES=cpu=32 AllocTRES=
NodeName=g0 CPUAlloc=8 CPUTot=64 ActiveFeatures=nvlink,rack1 RealMemory=512000 AllocMem=64000 State=MIXED Partitions=gpu,all CfgTRES=cpu=64,gres/gpu=4,gres/gpu:a100=4 AllocTRES=cpu=8,gres/gpu=1,gres/gpu:a100=1
NodeName=g1 CPUAlloc=0 CPUTot=64 ActiveFeatures=rack1 RealMemory=512000 AllocMem=0 State=IDLE Partitions=gpu CfgTRES=cpu=64,gres/gpu=4 AllocTRES=
"""  # noqa: E501 - as scontrol prints it
NOW = 10_000.0


def config(**changes):
    return SlurmConfig.from_data("hpc", {**CONFIG, **changes})


def spec(**changes):
    values = {"name": "job-1-1", "framework": Framework.PYTORCH, "image": Image(builtin="bare"), "nodes": 2}
    values |= {"workers_per_node": 1, "resources": Resources(cpus=2.5, memory_mib=4000), "script": "train.py"}
    return RunSpec(**{**values, "deadline_seconds": 600, **changes})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("backend", "kubernetes"), ("partition", "cpu"), ("account", "a b"), ("accounts", {"acme": "--uid=0"}),
        ("node_types", {"gpu": "a100"}), ("node_types", {"gpu": {"gres": "gpu"}}),
        ("node_types", {"gpu": {"qos": "x;y"}}), ("conf", "slurm.conf"), ("pending_seconds", 0),
        ("containers", "enroot"), ("containers", True), ("containers_bin", "bin"), ("image_mib", 0),
        ("import_seconds", 0), ("insecure_registries", "r.example"), ("insecure_registries", ["https://r.example"]),
        ("account", "a\n"), ("bubblewrap", "/usr/bin/bwrap\n"), ("insecure_registries", ["r.example\n"]),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused_by_its_name(setting, value):
    with pytest.raises(ValueError, match=f"'hpc'.*'{setting}'"):
        config(**{setting: value})


def test_a_comment_of_a_job_is_no_preemption():
    """A preempted run is free, and the job's user writes the comment."""
    job = "JobId=7 JobName=job-1-1 PreemptTime={} Comment=a PreemptTime={}"
    assert has_preemption_time(job.format("2026-01-01T00:00:00", "None"))
    assert not has_preemption_time(job.format("None", "2026-01-01T00:00:00"))


def test_capacity_counts_the_machines_that_a_node_type_may_use():
    machines = parse_machines(MACHINES)
    assert [(machine.name, machine.has_failed, machine.is_open) for machine in machines] == [
        ("c0", False, True), ("c1", False, False), ("c2", True, False), ("g0", False, True), ("g1", False, True),
    ]  # fmt: skip
    found = compute_capacity(machines, config())
    by_name = {machine.name: machine for machine in found.machines}
    # g1 lacks a feature of the node type `gpu`, and is not in the partition of the others.
    assert by_name.keys() == {"c0", "c1", "c2", "g0"}
    # Of its 32 cores and 64,000 MiB, Slurm keeps 2 and 1,000 for itself (CPUEfctv, MemSpecLimit).
    assert (by_name["c0"].total, by_name["c0"].free) == (Resources(30, 63000), Resources(28, 59000))
    assert by_name["c1"].free == by_name["c2"].free == Resources(0, 0)
    assert by_name["g0"].free == Resources(56, 448000, 3, "NVIDIA-A100")
    assert found.nodes_now(Resources(14, 1000)) == 2
    assert found.nodes_ever(Resources(30, 1000)) == 3, "machines that are closed or down may come back"
    assert found.nodes_now(Resources(1, 1000, 1, "NVIDIA-A100"), "gpu") == 3, "one for each free GPU"
    assert found.nodes_ever(Resources(1, 1000, 1, "NVIDIA-H200"), "gpu") == 0


@pytest.mark.parametrize(
    ("state", "has_failed", "is_open"),
    [
        ("IDLE", False, True), ("ALLOCATED+PLANNED", False, True), ("IDLE+DYNAMIC_FUTURE", False, True),
        # Slurm has powered it down to save power, and powers it up for a job.
        ("IDLE+CLOUD+POWERED_DOWN", False, True), ("MIXED+CLOUD+NOT_RESPONDING+POWERING_UP", False, True),
        ("IDLE~", False, True), ("IDLE#+CLOUD", False, True),
        # Its jobs run on, but it gets no new ones before it has been powered down.
        ("MIXED+POWER_DOWN", False, False), ("IDLE+CLOUD+POWERING_DOWN", False, False),
        # An administrator has closed it, or it does not exist yet.
        ("IDLE+DRAIN", False, False), ("IDLE+MAINTENANCE", False, False), ("IDLE+REBOOT_REQUESTED", False, False),
        ("FUTURE", False, False), ("IDLE+DRAIN+POWERED_DOWN", False, False),
        # It has failed.
        ("DOWN", True, False), ("DOWN*+CLOUD", True, False), ("IDLE+NOT_RESPONDING", True, False),
        ("MIXED*", True, False), ("IDLE+FAIL", True, False), ("UNKNOWN", True, False),
        ("DOWN+CLOUD+NOT_RESPONDING+POWERED_DOWN", True, False), ("DOWN+CLOUD+POWERING_UP", True, False),
    ],
)  # fmt: skip
def test_a_machine_without_power_is_free_unless_it_has_failed(state, has_failed, is_open):
    (machine,) = parse_machines(f"NodeName=c0 CPUTot=8 RealMemory=16000 State={state} Partitions=cpu")
    assert (machine.has_failed, machine.is_open) == (has_failed, is_open)
    assert compute_capacity([machine], config()).nodes_now(Resources(4, 8000)) == (2 if is_open else 0)


def test_a_job_asks_for_the_nodes_as_tasks():
    gpus = spec(
        node_kind="gpu",
        labels={"organization": "acme"},
        resources=Resources(8, 64001, 2, "NVIDIA-A100"),
        min_nodes=1,
    )
    assert submission.arguments(gpus, config(), job_name="job-1-1.ab", log="/runs/log") == [
        "--job-name=job-1-1.ab", "--ntasks=2", "--cpus-per-task=8", "--mem-per-cpu=8001M",  # rounded up
        "--time=17",  # 600 s, 300 s to meet and 120 s of margin
        "--no-requeue", "--export=ALL", "--chdir=/", "--output=/runs/log", "--open-mode=append",
        "--gpus-per-task=a100:2", "--partition=gpu", "--constraint=nvlink&rack1", "--qos=high", "--account=acme-lab",
        "--no-kill",
    ]  # fmt: skip
    plain = submission.arguments(spec(), config(), job_name="j", log="/l")
    assert plain[1:4] == ["--ntasks=2", "--cpus-per-task=3", "--mem-per-cpu=1334M"]
    assert plain[-2:] == ["--partition=cpu", "--account=everybody"]
    script = submission.script(spec(), config(bin="/opt/my slurm"), ["python", "it's"])
    assert script.startswith("#!/bin/sh\nPATH='/opt/my slurm':$PATH\nexec srun --ntasks=2 ")
    assert script.endswith(""" python 'it'"'"'s'\n""")


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("None", WaitingCode.STARTING), ("Priority", WaitingCode.CLUSTER_QUEUE),
        ("QOSMaxCpuPerUserLimit", WaitingCode.CLUSTER_LIMIT), ("AssocGrpCpuLimit", WaitingCode.CLUSTER_LIMIT),
        ("(launch failed requeued held)", WaitingCode.HELD),
        ("ReqNodeNotAvail, UnavailableNodes:n1", WaitingCode.MACHINES_CLOSED),
        ("(Nodes required for job are DOWN, DRAINED or reserved)", WaitingCode.MACHINES_CLOSED),
        ("BadConstraints", WaitingCode.TOO_LARGE), ("InvalidQOS", WaitingCode.UNSCHEDULABLE),
        ("QOSNotAllowed", WaitingCode.CLUSTER_RULE), ("AssocMaxWallDurationPerJobLimit", WaitingCode.CLUSTER_RULE),
        ("QOSMaxGRESPerNode", WaitingCode.CLUSTER_RULE), ("QOSMinCpuNotSatisfied", WaitingCode.CLUSTER_RULE),
    ],
)  # fmt: skip
def test_slurms_reasons_become_codes(reason, code):
    (job,) = parse_jobs(f"7|PENDING|N/A|N/A||{reason}\n").values()  # id, state, start, end, machines, reason
    assert explain_waiting(job).code is code
    # The sentence quotes the reason, if there is one, without the details after a comma.
    assert code is WaitingCode.STARTING or reason.strip("()").partition(",")[0] in explain_waiting(job).sentence


@pytest.mark.parametrize(
    ("text", "error", "field"),
    [
        ("sbatch: error: Requested node configuration is not available", InvalidSpec, "nodes"),
        ("Requested time limit is invalid (missing or exceeds some limit)", InvalidSpec, "deadline_seconds"),
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", NoCapacity, None),
        ("Unable to contact slurm controller (connect failure)", BackendUnavailable, None),
        ("sbatch: error: Invalid account or account/partition combination specified", InvalidSpec, "account"),
        ("sbatch: error: Invalid qos specification", BackendUnavailable, None),
    ],
)  # fmt: skip
def test_what_sbatch_refuses_is_the_specs_or_the_clusters_fault(text, error, field):
    refusal = _translate_sbatch_error(CommandFailed(text), "acme-lab")
    assert type(refusal) is error
    assert getattr(refusal, "field", None) == field
    # An organization without its own account uses the shared one. If Slurm refuses that, the operator must repair it.
    shared = _translate_sbatch_error(CommandFailed(text), "")
    assert type(shared) is (BackendUnavailable if field == "account" else error)


# Evidence


def record(node=0, *, ended=False, started=True, silent_for=1.0, causes=()):
    """The record of a node on machine n<node>, whose supervisor sent its last heartbeat `silent_for` seconds ago."""
    return {
        "node": node, "machine": f"n{node}", "phase": "ended" if ended else "running", "address": "10.0.0.1",
        "started_at": 9000.0 if started else None, "finished_at": 9990.0 if ended else None, "exit_code": None,
        "detail": "", "causes": list(causes), "seen_at": NOW - silent_for, "silent": False,
    }  # fmt: skip


def by_slurm(node=0):
    """The cause of a node that Slurm ended with SIGTERM, which gives no reason."""
    return {
        "kind": "node_lost", "code": "evicted", "at": 9985.0, "node": node, "rank": None, "message": "",
        "data": {evidence.ENDED_BY_SLURM: True},
    }  # fmt: skip


def job(state):
    return SlurmJob("7", state, started_at=8990.0, ended_at=NOW - 10)


def status(records, state, *, request=None, failed=()):
    """Return the status of a run whose job is in this state; None: Slurm has forgotten it. `failed` are machines."""
    observation = Observation(
        job=None if state is None else job(state),
        end_request=request,
        failed_machines=frozenset(failed),
        submitted_at=8000.0,
        now=NOW,
    )
    return merge("job-1-1", 8000.0, [evidence.assess(node, each, observation) for node, each in enumerate(records)])


STOP = EndRequest(
    at=9980.0,
    grace_seconds=10.0,
    cause={"kind": "stopped", "code": "stopped", "message": "The run was stopped on request.", "data": {}},
)


@pytest.mark.parametrize(
    ("state", "request_", "outcome", "code"),
    [
        ("NODE_FAIL", None, Outcome.NODE_LOST, FailureCode.NODE_LOST),
        ("BOOT_FAIL", None, Outcome.NODE_LOST, FailureCode.NODE_LOST),
        ("PREEMPTED", None, Outcome.NODE_LOST, FailureCode.PREEMPTED),
        ("PREEMPTED", STOP, Outcome.NODE_LOST, FailureCode.PREEMPTED),
        ("CANCELLED", None, Outcome.NODE_LOST, FailureCode.NODE_LOST),
        ("CANCELLED", STOP, Outcome.STOPPED, FailureCode.STOPPED),
        ("TIMEOUT", None, Outcome.TIME_LIMIT, FailureCode.TIME_LIMIT),
        ("OUT_OF_MEMORY", None, Outcome.OUT_OF_MEMORY, FailureCode.OUT_OF_MEMORY),
        # No word of Slurm excuses the loss of the supervisor, so the code is held responsible.
        ("FAILED", None, Outcome.CODE_FAILED, FailureCode.LAUNCHER_KILLED),
        ("COMPLETED", None, Outcome.CODE_FAILED, FailureCode.LAUNCHER_KILLED),
        (None, None, Outcome.NODE_LOST, FailureCode.NODE_LOST),
    ],
)
def test_the_end_of_a_supervisor_has_the_cause_that_slurm_names(state, request_, outcome, code):
    ended = status([record()], state, request=request_)
    assert (ended.phase, ended.outcome, ended.failure.code) == (RunPhase.ENDED, outcome, code)
    # The same if the supervisor could still write that Slurm ended it, except where no reason is known: that is free.
    if state in {"FAILED", "COMPLETED", None}:
        outcome, code = Outcome.NODE_LOST, FailureCode.EVICTED
    ended = status([record(ended=True, causes=[by_slurm()])], state, request=request_)
    assert (ended.phase, ended.outcome, ended.failure.code) == (RunPhase.ENDED, outcome, code)


def test_a_run_does_not_end_before_slurm_says_why():
    assert status([record(ended=True, causes=[by_slurm()])], "COMPLETING").phase is RunPhase.STOPPING
    assert status([record(ended=True, causes=[by_slurm()])], "RUNNING").phase is RunPhase.STOPPING
    assert status([record()], "COMPLETING").phase is RunPhase.RUNNING


def test_the_node_on_the_failed_machine_is_the_lost_one():
    killed = {"kind": "code_failed", "code": "rank_killed", "at": 9985.2, "node": 0, "rank": 0, "signal": "SIGTERM"}
    ended = status(
        [record(0, ended=True, causes=[by_slurm(0), killed]), record(1, silent_for=15)], "NODE_FAIL", failed=["n1"]
    )
    assert (ended.outcome, ended.failure.node) == (Outcome.NODE_LOST, 1)
    # The machine failed after its node had succeeded: the other node was lost.
    ended = status([record(0, ended=True, causes=[by_slurm(0)]), record(1, ended=True)], "NODE_FAIL", failed=["n1"])
    assert (ended.outcome, ended.failure.node) == (Outcome.NODE_LOST, 0)
    assert status([record(0), record(1, ended=True)], "NODE_FAIL", failed=["n1"]).outcome is Outcome.NODE_LOST
    # While Slurm still lists the job, a machine that it calls failed is lost only if its supervisor is silent too.
    assert status([record(silent_for=5)], "RUNNING", failed=["n0"]).phase is RunPhase.RUNNING
    assert status([record(silent_for=20)], "RUNNING", failed=["n0"]).outcome is Outcome.NODE_LOST


@pytest.mark.parametrize(
    ("silent_for", "finished_at"),
    [(15.0, NOW - 10), (100.0, NOW - 10), (1.0, NOW - 1), (900.0, NOW - 900)],
    ids=["ended with its job", "long before it was noticed", "heartbeat after the job's end", "long before its job"],
)
def test_a_lost_node_is_metered_until_slurms_end_of_its_job(silent_for, finished_at):
    ended = status([record(silent_for=silent_for)], "TIMEOUT")
    assert (ended.outcome, ended.started_at, ended.finished_at) == (Outcome.TIME_LIMIT, 9000.0, finished_at)


def test_a_claim_about_another_node_is_believed_only_if_slurm_confirms_it():
    claim = {"kind": "node_lost", "code": "node_lost", "at": 9980.0, "node": 1, "rank": None, "message": "lost"}
    records = [record(0, ended=True, causes=[claim]), record(1, silent_for=30)]
    assert status(records, "FAILED", failed=["n1"]).outcome is Outcome.NODE_LOST
    assert status(records, "FAILED").outcome is Outcome.CODE_FAILED
    # A node that has succeeded is not lost, even if its machine fails later.
    assert status([record(ended=True)], "NODE_FAIL", failed=["n0"]).outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("state", "outcome"),
    [
        ("FAILED", Outcome.PLATFORM_ERROR), ("TIMEOUT", Outcome.PLATFORM_ERROR), (None, Outcome.PLATFORM_ERROR),
        ("OUT_OF_MEMORY", Outcome.PLATFORM_ERROR), ("NODE_FAIL", Outcome.NODE_LOST), ("CANCELLED", Outcome.NODE_LOST),
    ],
)  # fmt: skip
def test_before_code_has_begun_every_end_is_the_platforms(state, outcome):
    for records in ([None], [record(started=False)]):  # None: the node has written no record
        ended = status(records, state)
        # A supervisor that has written a record was there, so it is lost if Slurm has forgotten the job.
        expected = outcome if records == [None] or state is not None else Outcome.NODE_LOST
        assert (ended.outcome, ended.started_at) == (expected, None)
        # A supervisor that has written a record did start.
        assert records == [None] or "did not start" not in ended.failure.message
    assert status([None], "CANCELLED", request=STOP).outcome is Outcome.STOPPED


def test_a_requeued_or_silent_run_is_lost():
    """While Slurm says that the job runs, its supervisor may be silent for 120 s."""
    assert status([record(silent_for=30)], "PENDING").outcome is Outcome.NODE_LOST
    assert status([record(silent_for=200)], "RUNNING").failure.code is FailureCode.NODE_SILENT
    assert status([record(silent_for=100)], "RUNNING").phase is RunPhase.RUNNING
    assert status([None], "PENDING").phase is RunPhase.STARTING


def test_the_platforms_own_end_of_a_lost_run_never_becomes_a_customers_request(tmp_path):
    """Slurm does not answer while the console ends the job, and later reports that the job was cancelled."""

    state, cancelled = "RUNNING", []

    def cancel(job_id):
        if state == "RUNNING":
            raise BackendUnavailable("Slurm does not answer.")
        cancelled.append(job_id)

    slurm = SimpleNamespace(
        jobs=lambda max_age_seconds: {"7": SlurmJob("7", state, ended_at=1.0)},
        known_jobs=dict,
        machines=lambda _max_age_seconds: (),
        was_preempted=lambda _job_id: False,
        cancel=cancel,
    )
    run = SlurmRun(tmp_path, "job-1-1", slurm, config())
    for folder in (run.folder / "nodes", run.active_marker.parent, run.change_file.parent):
        folder.mkdir(parents=True)
    run.active_marker.touch()
    run.record_submission(spec(nodes=1), nonce="n", job_id="7")
    write_json(run.folder / "nodes" / "0.json", record())
    os.utime(run.folder / "nodes" / "0.json", (9000, 9000))  # its last heartbeat was long ago
    with pytest.raises(BackendUnavailable):
        run.status()
    state = "CANCELLED"
    for _ in range(2):
        assert run.status().outcome is Outcome.NODE_LOST
        assert cancelled == ["7"], "the console tries again until Slurm has the request"
    # Another process that saw the end too may judge it otherwise. The records that were stored first stay.
    assert run._store_end([record()])[0]["loss"]["kind"] == Outcome.NODE_LOST


def test_a_run_with_a_damaged_submission_is_missing_only_when_slurm_has_no_job_of_it(tmp_path):
    jobs = ["7"]
    run = SlurmRun(tmp_path, "job-1-1", SimpleNamespace(active_jobs=lambda _job_name: jobs), config())
    run.folder.mkdir()
    (run.folder / "submission.json").write_text("{")
    with pytest.raises(RunUnreadable, match="damaged"):
        run.status()
    jobs.clear()
    with pytest.raises(RunNotFound):
        run.status()


@pytest.mark.parametrize("file", ["submission.json", "nodes/0.json", "final.json"])
def test_an_error_of_the_storage_decides_no_end(tmp_path, monkeypatch, file):
    """The machine of a run failed. One read of a file of the run is an error, and later reads succeed."""
    jobs = {"7": SlurmJob("7", "FAILED", ended_at=1.0)}
    slurm = SimpleNamespace(
        jobs=lambda max_age_seconds: jobs,
        known_jobs=lambda: jobs,
        machines=lambda _max_age_seconds: (SimpleNamespace(name="n0", has_failed=True),),
        was_preempted=lambda _job_id: False,
        cancel=lambda _job_id: None,
    )
    run = SlurmRun(tmp_path, "job-1-1", slurm, config())
    (run.folder / "nodes").mkdir(parents=True)
    run.record_submission(spec(nodes=1), nonce="n", job_id="7")
    write_json(run.folder / "nodes" / "0.json", record())
    read_bytes, errors = Path.read_bytes, [OSError(errno.EIO, "Input/output error")]

    def fail_once(path):
        if path == run.folder / file and errors:
            raise errors.pop()
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", fail_once)
    with pytest.raises(RunUnreadable, match="Input/output error"):
        run.status()
    assert run.status().outcome is Outcome.NODE_LOST


def test_a_run_that_cannot_be_read_blocks_neither_its_cluster_nor_its_deletion(tmp_path, monkeypatch):
    backend = SlurmBackend(config=config(), root=tmp_path / "runs", images_root=tmp_path)
    selections, active = [], [["7"], []]
    backend._slurm = SimpleNamespace(
        jobs=lambda max_age_seconds: {},
        machines=lambda max_age_seconds: (),
        kill=selections.append,
        active_jobs=lambda _job_name: active.pop(0) if active else [],
    )
    run = backend._find("job-1-1")
    (run.folder / "submission.json").mkdir(parents=True)  # reading it is an error that root gets too
    run.active_marker.touch()
    assert backend.capacity().machines == ()
    backend.kill("job-1-1")
    assert (active, run.folder.exists(), backend.names(live=True)) == ([], True, []), "it waits for the jobs' end"
    assert selections.pop() == [f"--name={run.job_name}"]
    active[:] = [["7"]] * 2
    monkeypatch.setattr("runtime.backends.slurm.backend._REPEATED_KILL_SECONDS", -1)
    run.active_marker.touch()
    with pytest.raises(BackendUnavailable, match="have not ended: 7"):
        backend.kill("job-1-1")
    assert backend.names(live=True) == ["job-1-1"], "it may still compute"
    selections.clear()
    active.clear()
    backend.delete("job-1-1")
    assert selections == [[f"--name={run.job_name}"]]
    assert (run.folder.exists(), backend.names(live=True)) == (False, [])


def test_a_run_that_is_submitted_while_it_is_deleted_keeps_no_job(tmp_path, monkeypatch):
    backend = SlurmBackend(config=config(), root=tmp_path / "runs", images_root=tmp_path)
    run = backend._find("job-1-1")
    killed = []

    def kill(run):
        """Record the job that is killed. Another process completes its submission after the first call."""
        killed.append(run.job_id())
        if len(killed) == 1:
            run.folder.mkdir()
            run.record_submission(spec(), nonce="n", job_id="7")

    monkeypatch.setattr(SlurmRun, "kill", kill)
    backend.delete("job-1-1")
    assert killed == ["", "7"]
    assert not run.folder.exists()


def test_slurm_is_asked_only_where_the_records_do_not_suffice():
    fresh, silent, max_silence_seconds = record(), record(silent_for=30), 15.0
    assert not evidence.needs_slurm([fresh, record(ended=True, silent_for=900)], NOW, max_silence_seconds)
    for each in (None, silent, record(ended=True, causes=[by_slurm()])):
        assert evidence.needs_slurm([fresh, each], NOW, max_silence_seconds)


@pytest.mark.parametrize(("state", "is_known"), [("RUNNING", False), ("PENDING", False), ("TIMEOUT", True)])
def test_accounting_that_has_not_recorded_the_end_of_a_job_knows_nothing(tmp_path, state, is_known):
    """The controller no longer lists the job, so accounting is wrong if it has the job as running or pending."""
    (tmp_path / "sacct").write_text(f"#!/bin/sh\necho '7|{state}|8990|9990|n0|None'\n")
    (tmp_path / "sacct").chmod(0o755)
    job = Slurm(config(bin=str(tmp_path), accounting=True)).finished_job("7")
    assert (None if job is None else job.state) == (state if is_known else None)


def test_lines_of_sacct_are_read_like_those_of_squeue():
    jobs = parse_jobs("7|CANCELLED by 1000|1700000000|1700000060|n[0-1]|None\n7.batch|CANCELLED|1|2||\n\n")
    assert jobs == {"7": SlurmJob("7", "CANCELLED", 1700000000.0, 1700000060.0, "n[0-1]", "None")}
    assert dataclasses.replace(jobs["7"], state="RUNNING").is_active, "the state counts, not the end"
