"""A real Slurm with accounting (slurmdbd): accounts of organizations, and jobs that only accounting remembers."""

import pytest

from runtime.backends.slurm import check
from runtime.backends.slurm.commands import Slurm
from runtime.errors import BackendUnavailable, InvalidSpec, NoCapacity
from runtime.specs import FailureCode, Outcome, RunPhase, WaitingCode
from tests.runtime.backends.contract import WAIT
from tests.slurm.accounting import ACCOUNT, FOREIGN_ACCOUNT, ORGANIZATION_ACCOUNT

pytestmark = [
    pytest.mark.rerun_if_late("its runs are real processes, which a controller starts after a second or more"),
    pytest.mark.slow,
]


def account_of(harness, name):
    return harness.cluster.call("squeue", "--noheader", f"--jobs={harness.job_id(name)}", "--format=%a").strip()


def test_each_organization_uses_its_account_and_its_limits(accounting_harness):
    cluster, backend = accounting_harness.cluster, accounting_harness.backend
    for number, organization in ((1, "acme"), (2, "somebody")):  # the second has no account of its own
        spec = accounting_harness.spec(WAIT, name=f"job-{number}-1", labels={"organization": organization})
        backend.submit(spec)
    assert account_of(accounting_harness, "job-1-1") == ORGANIZATION_ACCOUNT
    assert account_of(accounting_harness, "job-2-1") == ACCOUNT
    accounting_harness.wait_for_text("ready", "job-1-1")
    try:
        cluster.manage("modify", "account", ORGANIZATION_ACCOUNT, "set", "MaxJobs=1", "MaxSubmitJobs=2")
        backend.submit(accounting_harness.spec(WAIT, name="job-3-1", labels={"organization": "acme"}))
        status = accounting_harness.wait("job-3-1", lambda status: status.waiting_code == WaitingCode.CLUSTER_LIMIT)
        assert status.waiting_data == {"detail": "AssocMaxJobsLimit"}
        with pytest.raises(NoCapacity, match="limit"):
            backend.submit(accounting_harness.spec(WAIT, name="job-4-1", labels={"organization": "acme"}))
    finally:
        cluster.manage("modify", "account", ORGANIZATION_ACCOUNT, "set", "MaxJobs=-1", "MaxSubmitJobs=-1")


def test_an_organization_without_an_association_is_refused_and_others_are_not(accounting_harness):
    """The settings give `newcomer` an account to which the console's user may not submit."""
    with pytest.raises(InvalidSpec, match=f"'{FOREIGN_ACCOUNT}'.*Invalid account") as refusal:
        accounting_harness.submit(labels={"organization": "newcomer"})
    assert refusal.value.field == "account"
    assert accounting_harness.backend.names() == []
    accounting_harness.complete("print()", labels={"organization": "acme"})


def test_jobs_that_only_accounting_remembers_are_explained_and_metered(accounting_harness):
    """The console is down while the runs end, and until the controller has forgotten them."""
    cluster = accounting_harness.cluster
    expected = {
        "timed-out": (Outcome.TIME_LIMIT, FailureCode.TIME_LIMIT),
        "machine-failed": (Outcome.NODE_LOST, FailureCode.NODE_LOST),
        "killed": (Outcome.CODE_FAILED, FailureCode.LAUNCHER_KILLED),
    }
    for name in expected:
        accounting_harness.start(WAIT, name=name, deadline_seconds=600)
    job_ids = {name: accounting_harness.job_id(name) for name in expected}
    cluster.call("scontrol", "update", f"jobid={job_ids['timed-out']}", "EndTime=now+1")
    accounting_harness.lose_node(0, "machine-failed")
    accounting_harness.kill_supervisor("killed")
    cluster.wait_until(lambda: not cluster.call("squeue", "--noheader", "--states=all"), "an empty queue")
    cluster.stop_slurmdbd()
    try:
        with pytest.raises(BackendUnavailable, match="sacct"):
            accounting_harness.new_backend().describe("timed-out")
    finally:
        cluster.start_slurmdbd()
    console, slurm = accounting_harness.new_backend(), Slurm(accounting_harness.config())
    ended, jobs = {}, {}
    for name, (outcome, code) in expected.items():
        ended[name], jobs[name] = console.describe(name), slurm.finished_job(job_ids[name])
        assert (ended[name].phase, ended[name].outcome) == (RunPhase.ENDED, outcome), accounting_harness.all_logs(name)
        assert ended[name].failure.code is code
        assert ended[name].started_at >= jobs[name].started_at
    # The killed supervisor wrote no end, so that of Slurm counts. It is in whole seconds, so the last heartbeat may
    # be later.
    last_heartbeat_at = accounting_harness.record_path(0, "killed").stat().st_mtime
    assert ended["killed"].finished_at == max(jobs["killed"].ended_at, last_heartbeat_at)


def test_the_checks_name_the_accounts_that_slurm_refuses(accounting_harness):
    def results(config):
        folder = accounting_harness.folder / "runs"
        found = check.check(
            accounting_harness.backend, config, root=folder, images_root=accounting_harness.images_root, smoke=False
        )
        return {each.name: each for each in found}

    found = results(accounting_harness.config())
    assert found["accounting"].ok
    assert not found["accounts"].ok
    assert found["accounts"].detail == f"Slurm refuses the console's jobs for: {FOREIGN_ACCOUNT}."
    assert found["accounts"].remedy.endswith(f" account={FOREIGN_ACCOUNT}")
    found = results(accounting_harness.config(accounts={"acme": ORGANIZATION_ACCOUNT}))
    assert found["accounts"].ok, found["accounts"].detail
    assert "set 'accounting' to true" in results(accounting_harness.config(accounting=False))["accounting"].remedy
