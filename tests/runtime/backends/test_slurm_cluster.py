"""What Slurm does to a run by itself, on a real Slurm: see `tests.slurm`. The contract suite has the rest."""

import pytest

from runtime.backends.slurm import check
from runtime.backends.slurm.commands import INHERITED_VARIABLES, Slurm
from runtime.errors import RunNotFound
from runtime.specs import FailureCode, Outcome, RunPhase, WaitingCode
from tests.runtime.backends.contract import POLITE, WAIT

pytestmark = [
    pytest.mark.rerun_if_late("its runs are real processes, which a controller starts after a second or more"),
    pytest.mark.slow,
]
EVERY_CORE = ["--ntasks=3", "--cpus-per-task=2", "--mem-per-cpu=100M"]
"""Arguments of a job that takes every core of the cluster."""


def test_a_preempted_run_is_free_and_can_save_its_work(slurm_harness):
    slurm_harness.start(POLITE, nodes=3)
    slurm_harness.cluster.call("sbatch", *EVERY_CORE, "--partition=urgent", "--output=/dev/null", "--wrap=true")
    failure = slurm_harness.wait_for_failure(Outcome.NODE_LOST)
    assert failure.code is FailureCode.PREEMPTED, slurm_harness.all_logs("job-1-1")
    # Slurm and the launcher both send SIGTERM, so the second may come while the handler prints.
    assert all(slurm_harness.log(rank).startswith("ready\nsaved") for rank in range(3))


def test_a_job_that_an_administrator_cancels_is_free(slurm_harness):
    slurm_harness.start(WAIT, nodes=2)
    slurm_harness.cluster.call("scancel", slurm_harness.job_id())
    assert slurm_harness.wait_for_failure(Outcome.NODE_LOST).code is FailureCode.NODE_LOST
    assert slurm_harness.backend.names(live=True) == []


def test_a_run_says_why_it_waits_and_returns_to_the_consoles_queue(slurm_harness):
    arguments = ["--parsable", *EVERY_CORE, "--output=/dev/null", "--wrap=sleep 600"]
    blocker = slurm_harness.cluster.call("sbatch", *arguments).strip()
    squeue = ["squeue", "--noheader", f"--jobs={blocker}", "--format=%T"]
    try:
        slurm_harness.cluster.wait_until(
            lambda: slurm_harness.cluster.call(*squeue).strip() == "RUNNING", "the other job"
        )
        slurm_harness.backend = slurm_harness.new_backend(pending_seconds=3)
        slurm_harness.submit(WAIT, nodes=2)
        status = slurm_harness.wait("job-1-1", lambda status: status.waiting_code == WaitingCode.CLUSTER_QUEUE)
        assert (status.phase, status.started_at) == (RunPhase.STARTING, None)
        assert sum(machine.free.cpus for machine in slurm_harness.backend.capacity().machines) == 0
        ended = slurm_harness.wait_for_end()
        assert (ended.outcome, ended.failure.code) == (Outcome.NO_CAPACITY, FailureCode.NODES_NOT_PLACED)
        assert ended.started_at is None
        slurm_harness.submit(WAIT, name="job-2-1")
        job_id = slurm_harness.job_id("job-2-1")
        slurm_harness.backend.delete("job-2-1")
        assert slurm_harness.cluster.call("squeue", "--noheader", f"--jobs={job_id}", "--format=%T") == ""
    finally:
        slurm_harness.cluster.call("scancel", blocker)


def test_a_job_of_an_interrupted_submission_starts_no_node(slurm_harness, monkeypatch):
    """The console dies after sbatch and before the record of the submission; later it submits the run again."""
    spec = slurm_harness.spec("print('once')")

    class Killed(BaseException):
        pass

    def die(*_arguments, **_names):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("runtime.backends.slurm.runs.SlurmRun.record_submission", die)
        # A dead console does not clean up.
        patch.setattr("runtime.backends.slurm.backend.SlurmBackend._remove_failed_submission", lambda *_: False)
        with pytest.raises(Killed):
            slurm_harness.backend.submit(spec)
    assert slurm_harness.backend.names() == ["job-1-1"], "reconciliation sees it"
    with pytest.raises(RunNotFound):
        slurm_harness.backend.describe("job-1-1")
    slurm_harness.backend.submit(spec)
    slurm_harness.wait_for_outcome(Outcome.COMPLETED)
    assert slurm_harness.log() == "once\n"
    states = slurm_harness.cluster.call("squeue", "--noheader", "--states=all", "--format=%j %T").split("\n")
    states_of_its_jobs = sorted(
        line.split()[1] for line in states if line.startswith(slurm_harness.backend._find("job-1-1").job_name)
    )
    assert states_of_its_jobs[0] == "CANCELLED", "that of the interrupted submission"


def test_a_job_has_no_variables_of_the_console_nor_of_the_users_profile(slurm_harness, tmp_path, monkeypatch):
    monkeypatch.setenv("CONSOLE_SECRET", "hidden")
    output = tmp_path / "environment"
    # PWD, SHLVL and _ are left out, since the shell of the script sets them.
    Slurm(slurm_harness.config()).submit(
        ["--wait", "--export=ALL", f"--output={output}"], "#!/bin/sh\nexec env -u PWD -u SHLVL -u _ env\n"
    )
    names = {line.partition("=")[0] for line in output.read_text().splitlines()}
    assert "PATH" in names
    # The console sets LC_ALL for Slurm's tools, and Slurm sets the last three for each job.
    allowed = {*INHERITED_VARIABLES, "LC_ALL", "ENVIRONMENT", "HOSTNAME", "TMPDIR"}
    assert {name for name in names - allowed if not name.startswith("SLURM")} == set()


def test_the_checks_of_a_cluster_pass(slurm_harness):
    found = list(
        check.check(
            slurm_harness.backend,
            slurm_harness.config(),
            root=slurm_harness.folder / "runs",
            images_root=slurm_harness.images_root,
            smoke=False,
        )
    )
    assert [each.name for each in found if not each.ok] == ["images"], "the bare image is none of the recipes"
    assert "3 machines" in next(each.detail for each in found if each.name == "machines")
    wrong = slurm_harness.config(conf="/nowhere/slurm.conf")
    *_, last = check.check(
        slurm_harness.backend, wrong, root=slurm_harness.folder / "runs", images_root=slurm_harness.images_root
    )
    assert (last.name, last.ok) == ("controller", False)
    assert not slurm_harness.new_backend(conf="/nowhere/slurm.conf").is_reachable()
    assert slurm_harness.backend.is_reachable()
