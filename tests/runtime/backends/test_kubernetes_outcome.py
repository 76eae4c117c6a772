"""How a run ends on Kubernetes: the outcome table of `docs/kubernetes.md`, and the times that are billed."""

import dataclasses

import pytest

from runtime.backends.kubernetes.outcome import derive_status
from runtime.backends.kubernetes.state import EXTERNALLY_DELETED, SpecSummary, Termination, dump_status, load_status
from runtime.specs import FailureCode, Framework, Image, Outcome, Resources, RunPhase, RunSpec, Span
from tests.runtime.backends.samples import END, FAILED, JOB, START, ended, running


def record(*causes, **more):
    return {"phase": "ended", "started_at": START, "causes": list(causes), **more}


def cause(kind, code, at=END - 1, node=0, **more):
    return {"kind": kind, "code": code, "at": at, "node": node, **more}


RANK_1_EXITED = cause("code_failed", "rank_exited", rank=1, node=1, exit_code=3, last_lines=["boom"])


def status_of(job, *pods, records=None, unreachable_since=None, now=END + 5):
    pods_by_node = {one.node: one for one in pods}
    return derive_status(job, pods_by_node, records or {}, now=now, unreachable_since=unreachable_since)


def test_a_completed_run_is_metered_from_the_last_start_to_the_last_end():
    done = dataclasses.replace(JOB, end_condition="Complete", ended_at=END + 2)
    status = status_of(done, ended(0), ended(1, finished_at=END - 3))
    assert (status.phase, status.outcome, status.failure) == (RunPhase.ENDED, Outcome.COMPLETED, None)
    assert (status.started_at, status.finished_at) == (START, END)
    assert status.spans == (Span(2, START, END),)


FAILING = dataclasses.replace(JOB, is_failing=True, failed_at=END, failure_reason="BackoffLimitExceeded")


@pytest.mark.parametrize(
    ("job", "pods", "phase"),
    [
        (JOB, (), RunPhase.STARTING),
        (JOB, (running(0), running(1, started_at=None)), RunPhase.STARTING),
        (JOB, (running(0),), RunPhase.STARTING),
        (JOB, (running(0), running(1)), RunPhase.RUNNING),
        (JOB, (running(0), ended(1)), RunPhase.RUNNING),
        (JOB, (running(0), running(1, deletion_deadline=END + 60)), RunPhase.STOPPING),
        (FAILING, (running(0, deletion_deadline=END + 30), ended(1, 1)), RunPhase.STOPPING),
    ],
)
def test_a_run_runs_once_every_node_does_and_stops_until_its_last_pod_has_ended(job, pods, phase):
    status = status_of(job, *pods)
    assert (status.phase, status.outcome) == (phase, None)
    assert (status.started_at is None) == (phase is RunPhase.STARTING)


def test_a_shortened_grace_period_counts_from_the_later_stop():
    stopped = Termination(Outcome.STOPPED, FailureCode.STOPPED, "stopped", END)
    # Kubernetes computes the deadline from the first request, so it has passed already.
    late = running(0, deletion_deadline=END + 1)
    hurried = dataclasses.replace(JOB, termination=stopped, grace_end=END + 100)
    # A kubelet has 15 s to report the end.
    assert status_of(hurried, late, ended(1, 1), now=END + 110).phase is RunPhase.STOPPING
    assert status_of(hurried, late, ended(1, 1), now=END + 116).phase is RunPhase.ENDED


@pytest.mark.parametrize("both", [True, False], ids=["both records", "the record of the failed rank is lost"])
def test_an_exception_takes_precedence_over_its_echo(both):
    error = {"exception": "ValueError", "message": "a wrong shape"}
    raised = cause("code_failed", "rank_raised", at=END - 1, node=1, rank=1, exit_code=1, data=error)
    echo = cause("code_failed", "rank_raised", at=END - 30, rank=0, exit_code=1, echo=True, data={"exception": "E"})
    failed = dataclasses.replace(FAILED, failed_at=END, ended_at=END)
    # `heard`: node 0 repeats what node 1 told it.
    records = {0: record(echo, {**raised, "heard": True})} | ({1: record(raised)} if both else {})
    status = status_of(failed, ended(0, 1), ended(1, 1), records=records)
    assert (status.failure.rank, status.failure.code, status.failure.data) == (1, FailureCode.RANK_RAISED, error)
    assert status.failure.message == "Rank 1 on node 1 raised ValueError: a wrong shape"


def case(name, expected, *pods, **records):
    """A row of the table: its expected end, both Pods (by default the second exited with 1), and causes by node."""
    both = pods if len(pods) > 1 else (*pods, ended(1, 1))
    return pytest.param(both, {int(node[-1]): record(one) for node, one in records.items()}, expected, id=name)


def exit_at(at):
    """The cause of a rank of node 1 that exited at this time."""
    return cause("code_failed", "rank_exited", at=at, node=1)


# Expected ends, and then what Pods show in each state.
EXITED = (Outcome.CODE_FAILED, FailureCode.RANK_EXITED)
MEMORY = (Outcome.OUT_OF_MEMORY, FailureCode.OUT_OF_MEMORY)
SILENT = (Outcome.CODE_FAILED, FailureCode.NODE_SILENT)
BROKEN = (Outcome.CODE_FAILED, FailureCode.PLATFORM_ERROR)
LOST = (Outcome.NODE_LOST, FailureCode.NODE_LOST)
EVICTED = (Outcome.NODE_LOST, FailureCode.EVICTED)
PREEMPTED = (Outcome.NODE_LOST, FailureCode.PREEMPTED)
DISK = (Outcome.DISK_FULL, FailureCode.DISK_FULL)
TIME = (Outcome.TIME_LIMIT, FailureCode.TIME_LIMIT)
REJECTED = (Outcome.NO_CAPACITY, FailureCode.NODES_NOT_PLACED)
UNUSABLE = (Outcome.PLATFORM_ERROR, FailureCode.IMAGE_UNUSABLE)
EVICTION = {"pod_reason": "Evicted", "disruption": "TerminationByKubelet", "disrupted_at": END}
OWN_LIMIT = 'Usage of EmptyDir volume "tmp" exceeds the limit "512Mi".'
DRAIN = {"disruption": "EvictionByEvictionAPI"}
PREEMPTION = {"disruption": "PreemptionByScheduler", "disrupted_at": END - 1}
UNKNOWN = {"container_reason": "ContainerStatusUnknown"}
DELETED = {**UNKNOWN, "started_at": None, "deletion_deadline": END}
UNREACHABLE = {"disruption": "DeletionByTaintManager", "disrupted_at": END + 60, "deletion_deadline": END}
SHUTDOWN = {"pod_reason": "Terminated", "disrupted_at": END}
NO_ROOM = {"pod_reason": "OutOfcpu", "started_at": None}
NO_PYTHON = {"container_reason": "StartError", "started_at": None}


@pytest.mark.parametrize(
    ("pods", "records", "expected"),
    [
        case("code exited", EXITED, ended(0), node1=RANK_1_EXITED),
        case("code exited without a record", EXITED, ended(0), ended(1, 3)),
        case("OOM kill, by the kubelet", MEMORY, ended(0, 137, container_reason="OOMKilled"), node1=exit_at(END + 0.5)),
        # 137: SIGKILL. Only the kernel can kill the first process of a container, and it does so for memory.
        case("killed without a reason", MEMORY, ended(0, 137), ended(1, 1, finished_at=END + 1)),
        case("out of memory, by its record", MEMORY, ended(0, 1), node0=cause("out_of_memory", "out_of_memory")),
        case("machine restarted", LOST, ended(0, 255, container_reason="Unknown"), node1=exit_at(END - 5)),
        case("machine restarted, container status unknown", LOST, ended(0, 137, **UNKNOWN)),
        case("deleted by its Job before its container started", EXITED, ended(0, 137, **DELETED), node1=RANK_1_EXITED),
        case("evicted because of its machine", EVICTED, ended(0, 137, **EVICTION)),
        case("evicted because of its own limit", DISK, ended(0, 137, **EVICTION, pod_message=OWN_LIMIT)),
        case(
            "drained", EVICTED, ended(0, 1, **DRAIN, disrupted_at=END - 1), node1=cause("node_lost", "node_lost", END)
        ),
        case("preempted", PREEMPTED, ended(0, 1, **PREEMPTION), node1=exit_at(END)),
        case("machine unreachable, reported late", LOST, running(0, **UNREACHABLE), node1=exit_at(END - 5)),
        case("machine shut down", LOST, ended(0, 137, **SHUTDOWN)),
        case("rejected by the kubelet", REJECTED, ended(0, None, **NO_ROOM)),
        case("the pod's own deadline", TIME, ended(0, 137, pod_reason="DeadlineExceeded")),
        case("the run's deadline", TIME, ended(0, 1), node0=cause("time_limit", "time_limit")),
        case("disk full", DISK, ended(0, 1), node0=cause("disk_full", "disk_full")),
        case("platform image without Python", UNUSABLE, ended(0, 128, **NO_PYTHON)),
        case(
            "a peer that was lost, by the other's record", SILENT, ended(0, 1), node1=cause("node_lost", "node_silent")
        ),
        case(
            "a platform error, by its own record", BROKEN, ended(0, 1), node0=cause("platform_error", "platform_error")
        ),
        case(
            "the code failed well before a drain",
            EXITED,
            ended(0, 1, **DRAIN, disrupted_at=END),
            node1={**RANK_1_EXITED, "at": END - 30},
        ),
    ],
)
def test_outcome_table(pods, records, expected):
    # A Pod that has not ended is on an unreachable machine.
    status = status_of(FAILED, *pods, records=records, unreachable_since=None if pods[0].ended else {0: END})
    assert status.phase is RunPhase.ENDED
    assert (status.outcome, status.failure.code) == expected


def test_an_eviction_for_its_own_disk_limit_names_the_clusters_limit_if_the_run_has_none():
    resources = Resources(cpus=1, memory_mib=256)
    spec = RunSpec("job-1-1", Framework.PYTORCH, Image("pytorch"), 1, 1, resources, "train.py", deadline_seconds=60)
    for summary, data in (
        (SpecSummary.from_spec(spec, 51200), {"limit_mib": 51200}),
        (SpecSummary(), {}),  # stored by an older version
    ):
        job = dataclasses.replace(FAILED, spec=summary)
        status = status_of(job, ended(0, 137, **EVICTION, pod_message=OWN_LIMIT))
        assert status.failure.data == data


SUCCEEDED = record(exit_code=0, finished_at=END)
BOTH = {0: SUCCEEDED, 1: SUCCEEDED}
TAINTED = {"disruption": "DeletionByTaintManager", "disrupted_at": END + 60, "deletion_deadline": END + 60}
CODE_FAILED = record(RANK_1_EXITED)
FAILED_RECORD = record(cause("node_lost", "node_lost"), exit_code=1, finished_at=END)
RUNNING_RECORD = {**SUCCEEDED, "phase": "running"}


@pytest.mark.parametrize(
    ("pods", "records", "lost", "is_completed"),
    [
        pytest.param((running(0), running(1)), BOTH, (), True, id="both kubelets are down, not reported yet"),
        pytest.param((ended(0), running(1)), BOTH, (1,), True, id="the other machine is NotReady"),
        pytest.param(
            (ended(0), running(1, **TAINTED)), BOTH, (1,), True, id="the other machine's pod is being deleted"
        ),
        pytest.param((ended(0), ended(1, 255, container_reason="Unknown")), BOTH, (), True, id="the machine restarted"),
        pytest.param(
            (ended(0), running(1)), {0: SUCCEEDED}, (1,), True, id="no record of node 1, but node 0 ends last"
        ),
        pytest.param((running(0), ended(1)), {1: SUCCEEDED}, (0,), False, id="the record of node 0 is lost"),
        pytest.param(
            (ended(0), running(1)), {0: SUCCEEDED, 1: FAILED_RECORD}, (1,), False, id="node 1 recorded a failure"
        ),
        pytest.param(
            (ended(0, 1), running(1)), {0: CODE_FAILED, 1: RUNNING_RECORD}, (1,), False, id="node 1 still ran"
        ),
    ],
)
def test_a_recorded_success_counts_even_if_the_machine_is_lost(pods, records, lost, *, is_completed):
    status = status_of(JOB, *pods, records=records, unreachable_since=dict.fromkeys(lost, END + 40), now=END + 70)
    assert status.phase is RunPhase.ENDED
    assert status.outcome is (Outcome.COMPLETED if is_completed else Outcome.NODE_LOST)
    assert not is_completed or status.finished_at == END


@pytest.mark.parametrize(
    ("lost", "outcome"),
    [({}, Outcome.STOPPED), ({0: END + 3}, Outcome.NODE_LOST), ({0: END + 300}, Outcome.STOPPED)],
    ids=["its machine is Ready", "its machine was lost in the grace period", "its machine was lost long after it"],
)
def test_a_stopped_run_is_lost_only_with_its_machine(lost, outcome):
    """A Pod that is overdue on a Ready machine was stopped: its kubelet keeps to the first grace period."""
    termination = Termination(Outcome.STOPPED, FailureCode.STOPPED, "The run was stopped on request.", END)
    spec = dataclasses.replace(JOB.spec, grace_seconds=60)
    job = dataclasses.replace(JOB, spec=spec, termination=termination, grace_end=END + 2)
    overdue = running(0, deletion_deadline=END + 2)
    in_grace = status_of(job, overdue, ended(1, 1), now=END + 70)
    assert in_grace.phase is RunPhase.STOPPING
    final = status_of(job, overdue, ended(1, 1), unreachable_since=lost, now=END + 400)
    assert (final.phase, final.outcome) == (RunPhase.ENDED, outcome)


@pytest.mark.parametrize("builtin", [True, False])
@pytest.mark.parametrize("kind", ["node_lost", "platform_error", "no_capacity", "stopped"])
def test_no_claim_from_inside_a_pod_makes_a_run_free(kind, *, builtin):
    job = dataclasses.replace(FAILED, spec=dataclasses.replace(FAILED.spec, builtin=builtin))
    for code in ("node_lost", "node_silent", "nodes_not_met", "evicted", "platform_error", "unknown"):
        claim = record(cause(kind, code))
        status = status_of(job, ended(0, 1), ended(1, 1), records={0: claim, 1: claim})
        assert status.outcome is Outcome.CODE_FAILED
        assert (status.started_at, status.finished_at) == (START, END)


CUSTOMERS_IMAGE = dataclasses.replace(FAILED, spec=dataclasses.replace(FAILED.spec, builtin=False))


@pytest.mark.parametrize(
    ("job", "outcome"),
    [(FAILED, Outcome.PLATFORM_ERROR), (CUSTOMERS_IMAGE, Outcome.CODE_FAILED)],
    ids=["a platform image", "a customer's image"],
)
def test_only_a_platform_image_can_report_that_the_nodes_never_met(job, outcome):
    never = record(cause("platform_error", "nodes_not_met"), started_at=None)
    status = status_of(job, ended(0, 1), ended(1, 1), records={0: never, 1: never})
    assert (status.outcome, status.failure.code) == (outcome, FailureCode.NODES_NOT_MET)
    assert status.started_at == START, "when the kubelets started the containers"


def test_a_hang_is_billed_to_the_last_progress_for_platform_images_only():
    given = {0: record(cause("hung", "hung", data={"progress_at": START + 20}), progress_at=START + 30)}
    assert status_of(FAILED, ended(0, 1), ended(1, 1), records=given).progress_at == START + 20
    charged = status_of(CUSTOMERS_IMAGE, ended(0, 1), ended(1, 1), records=given)
    assert charged.progress_at == END
    assert charged.failure.data["charged_whole"], "the console explains it"
    given[0]["causes"][0]["data"]["used_seconds"] = 4.0
    billed = status_of(FAILED, ended(0, 1), ended(1, 1), records=given)
    assert billed.progress_at == START + 24, "plus the CPU time that it used while it hung"
    assert "charged_whole" not in billed.failure.data


def test_a_run_in_a_customers_image_cannot_date_its_own_end():
    """Code in an own image can find the key, sign that its node completed when it started, and work on."""
    job = dataclasses.replace(JOB, spec=dataclasses.replace(JOB.spec, builtin=False))
    forged = dict.fromkeys((0, 1), record(exit_code=0, finished_at=START))
    assert status_of(job, running(0), running(1), records=forged, now=END).phase is RunPhase.RUNNING
    lost = dict.fromkeys((0, 1), END + 40)
    ended_status = status_of(job, running(0), running(1), records=BOTH, unreachable_since=lost, now=END + 70)
    assert (ended_status.outcome, ended_status.finished_at) == (Outcome.COMPLETED, END), "lost after its end"
    stop = Termination(Outcome.STOPPED, FailureCode.STOPPED, "The run was stopped on request.", END)
    stopped = dataclasses.replace(job, termination=stop)
    overdue = (running(0, deletion_deadline=END + 40), running(1, deletion_deadline=END + 40))
    # Node 1 has no record in the second case, and the kubelet reports a success of node 0.
    for pods, records in ((overdue, forged), ((ended(0, finished_at=START), overdue[1]), {0: forged[0]})):
        status = status_of(stopped, *pods, records=records, now=END + 90)
        assert (status.outcome, status.finished_at) == (Outcome.STOPPED, END + 40), "its pods are only late"


@pytest.mark.parametrize(
    ("pod", "is_completed"),
    [
        ({"exit_code": 255, "container_reason": "Unknown"}, True),
        ({**UNKNOWN, **EVICTION}, True),
        ({**UNKNOWN, **DRAIN}, True),
        ({"exit_code": None, "container_reason": "", "disruption": EXTERNALLY_DELETED}, True),
        ({**UNKNOWN, **EVICTION, "pod_message": OWN_LIMIT}, False),
        ({**UNKNOWN, "deletion_deadline": END}, False),
    ],
    ids=["machine restarted", "evicted", "drained", "deleted", "evicted for its own limit", "stopped"],
)
def test_a_recorded_success_in_a_customers_image_counts_if_the_platform_ended_its_pod(pod, *, is_completed):
    """It counts where the run would be free without it. Where it would not, a forged record would make it free."""
    is_stopped = "deletion_deadline" in pod
    stop = Termination(Outcome.STOPPED, FailureCode.STOPPED, "stopped", END - 1) if is_stopped else None
    job = dataclasses.replace(CUSTOMERS_IMAGE, termination=stop)
    status = status_of(job, ended(0), ended(1, 137, **pod), records={1: record(exit_code=0, finished_at=END)})
    assert (status.outcome is Outcome.COMPLETED) is is_completed


def test_a_customers_image_without_python_is_a_code_failure():
    status = status_of(CUSTOMERS_IMAGE, ended(0, 128, **NO_PYTHON), running(1, started_at=None, ended=True))
    assert (status.outcome, status.started_at) == (Outcome.CODE_FAILED, None)


STOP = Termination(Outcome.STOPPED, FailureCode.STOPPED, "The run was stopped on request.", END - 2)


@pytest.mark.parametrize(
    ("exit_codes", "failed_at", "outcome"),
    [((0, 1), END, Outcome.STOPPED), ((0, 1), END - 7, Outcome.CODE_FAILED), ((0, 0), None, Outcome.COMPLETED)],
    ids=["a failure after the stop", "a failure before the stop", "a run that completed all the same"],
)
def test_the_first_of_stop_and_end_counts(exit_codes, failed_at, outcome):
    records = {1: record({**RANK_1_EXITED, "at": failed_at})} if failed_at else {}
    state = FAILED if failed_at else dataclasses.replace(JOB, end_condition="Complete", ended_at=END)
    # To stop a run, the console lets the Job exceed its deadline.
    job = dataclasses.replace(state, termination=STOP, failure_reason="DeadlineExceeded")
    pods = (ended(node, code) for node, code in enumerate(exit_codes))
    assert status_of(job, *pods, records=records).outcome is outcome


def test_a_partly_placed_run_that_was_ended_never_ran():
    termination = Termination(
        Outcome.NO_CAPACITY, FailureCode.NODES_NOT_PLACED, "Only 1 of 2.", END, {"placed": 1, "nodes": 2}
    )
    job = dataclasses.replace(FAILED, termination=termination, failure_reason="DeadlineExceeded")
    status = status_of(job, ended(0, 1))
    assert (status.outcome, status.started_at, status.spans) == (Outcome.NO_CAPACITY, None, ())
    assert status.failure.data == {"placed": 1, "nodes": 2}


def test_pods_that_vanish_are_a_platform_error():
    status = status_of(dataclasses.replace(FAILED, started_at=START))
    assert status.outcome is Outcome.PLATFORM_ERROR
    assert status.finished_at == END + 1, "the end of the Job"


@pytest.mark.parametrize(
    ("pod", "node", "subject"), [("Pod runs/job-1-1-0-x7k2p", 0, "Node 0"), ("A pod", None, "A node")]
)
def test_a_disruption_is_read_from_the_job_if_the_pod_is_deleted(pod, node, subject):
    message = f"{pod} has condition DisruptionTarget matching FailJob rule at index 0"
    job = dataclasses.replace(FAILED, failure_reason="PodFailurePolicy", failure_message=message)
    status = status_of(job, ended(1, 1), records={1: record(cause("node_lost", "node_lost"))})
    assert (status.outcome, status.failure.code, status.failure.node) == (Outcome.NODE_LOST, FailureCode.EVICTED, node)
    assert status.failure.message == f"{subject} was disrupted: {message}."


def test_an_overdue_pod_is_lost():
    overdue = running(0, deletion_deadline=END + 20)
    assert status_of(FAILING, overdue, ended(1, 1), now=END + 25).phase is RunPhase.STOPPING
    late = status_of(FAILING, overdue, ended(1, 1), now=END + 60)
    assert (late.phase, late.outcome) == (RunPhase.ENDED, Outcome.NODE_LOST)


def test_a_run_never_starts_before_its_submission():
    early = dataclasses.replace(JOB, submitted_at=START + 0.4)
    assert status_of(early, running(0), running(1)).started_at == START + 0.4


def test_an_elastic_run_pays_for_the_nodes_that_are_left():
    elastic = dataclasses.replace(JOB, spec=dataclasses.replace(JOB.spec, min_nodes=1))
    lost = ended(0, 1, finished_at=START + 50, disruption="EvictionByEvictionAPI", disrupted_at=START + 49)
    running_on = status_of(elastic, lost, running(1))
    assert running_on.phase is RunPhase.RUNNING
    assert running_on.spans == (Span(2, START, START + 50), Span(1, START + 50, None))
    failed = dataclasses.replace(
        elastic, is_failing=True, end_condition="Failed", ended_at=END, failure_reason="FailedIndexes"
    )
    done = status_of(failed, lost, ended(1))
    assert (done.outcome, done.failure) == (Outcome.COMPLETED, None)
    assert done.spans == (Span(2, START, START + 50), Span(1, START + 50, END))


def test_a_final_status_round_trips_through_json():
    status = status_of(FAILED, ended(0), ended(1, 1), records={1: record(RANK_1_EXITED)})
    assert load_status(dump_status(status)) == status
    with_nul = dataclasses.replace(status, failure=dataclasses.replace(status.failure, message="a\0"))
    assert load_status(dump_status(with_nul)).failure.message == "a\ufffd", "as it was stored by earlier versions"
