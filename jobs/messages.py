"""Sentences about jobs: why a job waits, what happened to it, why it ended, and who pays.

The database stores codes and data. The sentence is built when somebody reads it, in the reader's language.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from django.utils import formats, timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, pgettext

from billing.amounts import money
from console.accounts.zones import abbreviation
from jobs.resource_usage import Efficiency, Straggler
from jobs.states import PLATFORM_FAULTS, EndReason, OnHang, pays_for_hang
from runtime.specs import FailureCode, WaitingCode

MAX_PLACE_LENGTH = 200
"""Characters of a file name or a line of a stack, which come from the customer's code and may have any length. Real
ones are shorter."""
END_SENTENCES = {
    EndReason.COMPLETED: gettext_lazy("The run completed."),
    EndReason.CODE_FAILED: gettext_lazy(
        "Your code ended with an error. You pay for the time used, at least the minimum charge."
    ),
    EndReason.OUT_OF_MEMORY: gettext_lazy(
        "The run used more memory than its nodes have. Choose a larger node spec or a smaller batch "
        "size. You pay for the time used, at least the minimum charge."
    ),
    EndReason.DISK_FULL: gettext_lazy(
        "The run wrote more than its nodes' disks hold. Write less, or delete old checkpoints during the "
        "run. You pay for the time used, at least the minimum charge."
    ),
    EndReason.HUNG: gettext_lazy(
        "The run hung: output, metrics and computation stopped. You pay for the time up to its last sign "
        "of progress, and for the processor time used after that. The rest of the time it hung is free."
    ),
    EndReason.CANCELLED: gettext_lazy(
        "The run was cancelled. You pay for the time it used, at least the minimum charge."
    ),
    EndReason.TIME_LIMIT: gettext_lazy(
        "Stopped at its time limit to stay under the price ceiling. You pay for the time used, at least "
        "the minimum charge."
    ),
    EndReason.NO_CAPACITY: gettext_lazy("The cluster did not have enough capacity for the run."),
    EndReason.NODE_LOST: gettext_lazy("The platform lost a node of the run."),
    EndReason.PLATFORM_ERROR: gettext_lazy("The platform failed to run this."),
    EndReason.PACKAGES_FAILED: gettext_lazy(
        "The packages of the requirements file could not be installed. The run did not start and is free."
    ),
}
"""Why a job ended and, except for platform faults, who pays."""

FREE_END_SENTENCES = {
    EndReason.CODE_FAILED: gettext_lazy("The run ended with an error. It was free."),
    EndReason.OUT_OF_MEMORY: gettext_lazy(
        "The run used more memory than its nodes have. Choose a larger node spec or a smaller batch size. "
        "This run was free."
    ),
    EndReason.DISK_FULL: gettext_lazy(
        "The run wrote more than its nodes' disks hold. Write less, or delete old checkpoints during the run. "
        "This run was free."
    ),
    EndReason.HUNG: gettext_lazy("The run hung: output, metrics and computation stopped. This run was free."),
    EndReason.TIME_LIMIT: gettext_lazy("The free run reached its time limit."),
    EndReason.CANCELLED: gettext_lazy("The run was cancelled. It was free."),
}
"""For runs that cost nothing, such as checks, these replace the END_SENTENCES that mention a charge."""


def end_sentence(
    reason: str, *, is_hang_charged: bool = False, is_free: bool = False, is_notebook: bool = False
) -> str:
    """Return why a job ended and who pays; empty for a job that has not ended.

    `reason` is an EndReason or "". `is_hang_charged` is `pays_for_hang` of the last attempt's failure. `is_free`:
    nothing was charged. A notebook that was cancelled has ended as intended, so it is called stopped.
    """
    if is_notebook and reason == EndReason.CANCELLED:
        if is_free:
            return _("The notebook was stopped. It was free.")
        return _("The notebook was stopped. You pay for the time it used, at least the minimum charge.")
    if reason in PLATFORM_FAULTS:
        who_pays = _(
            "The last attempt is free. You pay for the time that earlier attempts used, at least the minimum charge."
        )
        return join_sentences(str(END_SENTENCES[EndReason(reason)]), _("The run is free.") if is_free else who_pays)
    if is_free and reason in FREE_END_SENTENCES:
        return str(FREE_END_SENTENCES[EndReason(reason)])
    if reason == EndReason.HUNG and is_hang_charged:
        return _(
            "The run hung: output, metrics and computation stopped. In an image of your own the platform "
            "can't verify progress, so you pay for the time until the run was ended."
        )
    return str(END_SENTENCES[EndReason(reason)]) if reason else ""


SWEEP_END_SENTENCES = {
    "completed": gettext_lazy("All trials have ended."),
    "ceiling": gettext_lazy("No other trial could start within the ceiling."),
    "stopped": gettext_lazy("The sweep was stopped."),
    "failing": gettext_lazy(
        "The first trials all failed. Check the script, and that it reports the metric under this name."
    ),
    "unavailable": gettext_lazy("No more trials could be ordered."),
}
"""Why a sweep ended, by `Sweep.Reasons`."""


def sweep_end_sentence(data: Mapping[str, Any]) -> str:
    """Return why a sweep ended, its trials, best value and charge. `data` comes from `sweeps.selectors.end_data`."""
    trials = ngettext(
        "%(trials_completed)d of %(trials)d trial completed.",
        "%(trials_completed)d of %(trials)d trials completed.",
        data["trials"],
    )
    best = ""
    if data["best"]:
        best = _("Best %(metric)s: %(value)s (job #%(job)d).") % {
            "metric": data["metric"],
            "value": f"{data['best']['value']:.6g}",
            "job": data["best"]["job"],
        }
    charged = _("Charged: %(charged)s of at most %(ceiling)s.") % {
        "charged": money(data["charged_minor"], data["currency"]),
        "ceiling": money(data["ceiling_minor"], data["currency"]),
    }
    return join_sentences(str(SWEEP_END_SENTENCES[data["reason"]]), trials % data, best, charged)


FAILURE_SENTENCES: dict[str, Any] = {
    FailureCode.STOPPED: gettext_lazy("The run was stopped."),
    FailureCode.TIME_LIMIT: gettext_lazy("The run reached its time limit."),
    FailureCode.NODE_LOST: gettext_lazy("Node %(node)s was lost: its supervisor or its machine stopped."),
    FailureCode.NODE_SILENT: gettext_lazy(
        "Node %(node)s stopped responding: it froze or lost its connection to the other nodes."
    ),
    FailureCode.NODE_NOT_STARTED: gettext_lazy("Node %(node)s did not start."),
    FailureCode.NODES_NOT_MET: gettext_lazy("The nodes could not connect to each other in time."),
    FailureCode.NODES_NOT_PLACED: gettext_lazy(
        "The cluster had capacity for only %(placed)s of %(nodes)s nodes, but the run needs all of them "
        "at once. The nodes were released."
    ),
    FailureCode.EVICTED: gettext_lazy(
        "The cluster evicted node %(node)s: its machine was drained, or was short of memory or disk."
    ),
    FailureCode.PREEMPTED: gettext_lazy("Node %(node)s was preempted by a workload of higher priority."),
    FailureCode.IMAGE_NAME: gettext_lazy("The image %(image)s does not exist. Check its name and tag."),
    FailureCode.IMAGE_CREDENTIALS: gettext_lazy(
        "The registry denied access to the image %(image)s. Check the user name and password saved for it."
    ),
    FailureCode.IMAGE_NETWORK: gettext_lazy("Could not reach the registry of the image %(image)s."),
    FailureCode.IMAGE_UNUSABLE: gettext_lazy(
        "The image %(image)s has no Python at the expected path. Use an image with Python 3.8 or later."
    ),
    FailureCode.IMAGE_TOO_LARGE: gettext_lazy(
        "The image %(image)s needs more than the %(limit_mib)s MiB of disk that an image may use on this cluster. "
        "Use a smaller image."
    ),
    FailureCode.IMAGE_TOO_SLOW: gettext_lazy(
        "Pulling and unpacking the image %(image)s took longer than %(limit_seconds)s seconds. Use a smaller image "
        "or a faster registry."
    ),
    FailureCode.IMAGE_NOT_UNPACKED: gettext_lazy(
        "The image %(image)s could not be unpacked: %(detail)s. Build it again with another tool, for example with "
        "gzip layers."
    ),
    FailureCode.LAUNCHER_KILLED: gettext_lazy(
        "The run's own processes stopped the launcher on node %(node)s. Send signals only to processes "
        "that your code starts."
    ),
    FailureCode.RANKS_NOT_STARTED: gettext_lazy(
        "Not all ranks of node %(node)s started, although other ranks of the run did. Let mpirun run until all ranks "
        "have started."
    ),
    FailureCode.NOT_STARTED: gettext_lazy("The platform could not start the run."),
    FailureCode.VANISHED: gettext_lazy("The cluster no longer has this run."),
    FailureCode.UNREADABLE: gettext_lazy("The platform could not read the run's files, so its result is not known."),
    FailureCode.MOVED: gettext_lazy("An administrator ended this attempt, so that another one starts. It is free."),
}
"""The sentence of each failure code that has only one. `_SENTENCE_FUNCTIONS` has the codes with several. For the other
codes, such as RANK_EXITED, `_process_sentence` says how the process ended. An ellipsis replaces a missing value."""
STEP_SENTENCES = {
    "image": gettext_lazy("The image is being pulled and unpacked. This time is free."),
    "place": gettext_lazy("The cluster is assigning machines to the nodes."),
    "container": gettext_lazy("The nodes are pulling the image and starting their containers."),
}
"""What a starting run is doing, by the `step` in the data of WaitingCode.STARTING. Other steps share one sentence."""
WAITING_SENTENCES: dict[str, Any] = {
    "copying_checkpoints": gettext_lazy("The checkpoints of job #%(job)s are copied. Then the nodes start."),
    "not_submitted": gettext_lazy(
        "The run could not be submitted to the cluster yet. The console tries again. If this continues, contact the "
        "administrator."
    ),
    WaitingCode.IMAGE_NAME: gettext_lazy(
        "The image %(image)s does not exist. Check its name and tag on the Images page, then cancel this "
        "run and order it again."
    ),
    WaitingCode.IMAGE_CREDENTIALS: gettext_lazy(
        "The registry denied access to the image %(image)s. Correct the user name and password saved for "
        "this registry; the cluster retries automatically."
    ),
    WaitingCode.IMAGE_NETWORK: gettext_lazy(
        "The cluster can't reach the registry of the image %(image)s. It retries automatically. If this "
        "continues, contact the administrator."
    ),
    WaitingCode.VOLUME: gettext_lazy(
        "The storage of the run can't be attached to its nodes yet. If this continues, give the "
        "administrator the name of the volume: %(claim)s."
    ),
    WaitingCode.QUOTA: gettext_lazy(
        "The cluster's quota is used up. The run starts when another run of your organization ends. To "
        "run more at once, ask the administrator."
    ),
    WaitingCode.TOO_LARGE: gettext_lazy(
        "No machine in the cluster is large enough for a node of this run. The run starts when the "
        "cluster grows. You can cancel it at no further cost."
    ),
    WaitingCode.TAINT: gettext_lazy(
        "The machines that fit are reserved for other work or not ready. If this continues, give the "
        "administrator the taint: %(taint)s."
    ),
    WaitingCode.ADMISSION: gettext_lazy(
        "The cluster has not admitted the run yet. All nodes start together when its queue admits the run."
    ),
    WaitingCode.UNSCHEDULABLE: gettext_lazy(
        "No machine in the cluster can take the nodes of this run now. If this continues, give the "
        "administrator this detail: %(detail)s"
    ),
    WaitingCode.CLUSTER_QUEUE: gettext_lazy(
        "The run waits in the cluster's own queue, behind other jobs or for machines in use. All nodes start together."
    ),
    WaitingCode.CLUSTER_LIMIT: gettext_lazy(
        "A limit of the cluster for your organization is reached (%(detail)s). The run starts when another run ends. "
        "To run more at once, ask the administrator."
    ),
    WaitingCode.CLUSTER_RULE: gettext_lazy(
        "The rules of the cluster do not allow this run (%(detail)s), so waiting does not help. Cancel it at no "
        "further cost, or ask the administrator."
    ),
    WaitingCode.HELD: gettext_lazy(
        "The cluster's administrator holds the run in the queue (%(detail)s). Ask the administrator to release it."
    ),
    WaitingCode.MACHINES_CLOSED: gettext_lazy(
        "The machines that fit are reserved or out of service (%(detail)s). The run starts when they return. If this "
        "continues, contact the administrator."
    ),
}
"""Why a job in state STARTING does not run yet, and what to do. The codes are WaitingCodes of the backend, and
`dispatch.COPYING` and `dispatch.NOT_SUBMITTED` before the run is submitted. `_free_machines_sentence` builds the
sentences about free machines."""
QUEUE_SENTENCES = {
    "backend_unavailable": gettext_lazy(
        "The cluster is not responding. The run starts when the cluster responds again."
    ),
    "drained": gettext_lazy("The administrator starts no runs on this cluster for now: %(why)s"),
    "packages": gettext_lazy("Installing the packages of the requirements file. Nothing is charged yet."),
}
"""Why a queued job waits, by the code of `WaitingReason`. `waiting_sentence` builds the sentences with numbers."""
REFUSAL_SENTENCES = {
    "script": gettext_lazy("The script is no longer in the workspace."),
    "mounts": gettext_lazy("A folder of the run no longer exists: its workspace or one of its datasets."),
    "from_checkpoint": gettext_lazy(
        "The checkpoints of the earlier job could not be copied. They were deleted, or your storage quota is used up."
    ),
    "image": gettext_lazy("The image can't be used on this cluster now."),
    "packages": gettext_lazy("The packages of the requirements file are no longer installed. Order the run again."),
    "controller": gettext_lazy("The image has no MPI on this cluster."),
    "account": gettext_lazy(
        "The cluster does not accept jobs of your organization on this node spec. Ask the administrator for access."
    ),
    "gpus": gettext_lazy("The image cannot use GPUs on this cluster. Choose nodes without GPUs, or another image."),
}
"""Why a cluster refused to start a run, by the field of InvalidSpec."""


def failure_sentence(failure: Mapping[str, Any]) -> str:
    """Return the sentence for a `runtime.specs.Failure`, given as the JSON data that an attempt stores."""
    code, data = str(failure.get("code", "")), dict(failure.get("data") or {})
    process = {"rank": failure.get("rank"), "node": failure.get("node")}
    if sentence_function := _SENTENCE_FUNCTIONS.get(code):
        return sentence_function(process | data)
    if sentence := FAILURE_SENTENCES.get(code):
        return str(sentence) % _WithEllipsis(process | data)
    return _process_sentence(process, failure) or _("The platform failed during the run.")


def _process_sentence(process: Mapping[str, Any], failure: Mapping[str, Any]) -> str:
    """Return how a rank's process or a node ended; empty if neither is known. `process` has rank and node."""
    if process["rank"] is not None and failure.get("signal"):
        return _("Rank %(rank)s on node %(node)s was killed by %(signal)s.") % {**process, "signal": failure["signal"]}
    if process["rank"] is not None and failure.get("exit_code") is not None:
        return _("Rank %(rank)s on node %(node)s exited with code %(code)s.") % {
            **process,
            "code": failure["exit_code"],
        }
    # On Kubernetes, a container may end without a record that names the rank.
    is_exit_of_node = failure.get("code") == FailureCode.RANK_EXITED and process["node"] is not None
    if is_exit_of_node and failure.get("exit_code") is not None:
        sentence = _("Node %(node)s ended with exit code %(code)s and left no record. The end of the log may show why.")
        return sentence % {"node": process["node"], "code": failure["exit_code"]}
    return ""


def _exception_sentence(data: Mapping[str, Any]) -> str:
    """Return a rank's exception as Python prints it, and where it was raised.

    A full stop at the end of the exception's message is removed, because the sentence has one.
    """
    if not data.get("exception"):
        return _("The code ended with an exception.")
    exception = ": ".join(str(part) for part in (data["exception"], data.get("message")) if part).rstrip(".")
    position = _code_position(data)
    sentence = _("Rank %(rank)s: %(exception)s (%(where)s).") if position else _("Rank %(rank)s: %(exception)s.")
    return sentence % {"rank": data["rank"], "exception": exception, "where": position}


def _code_position(data: Mapping[str, Any]) -> str:
    """Return file, line and function as far as they are known; empty without a file."""
    position = {name: str(data.get(name) or "")[:MAX_PLACE_LENGTH] for name in ("file", "line", "function")}
    if not position["file"] or not position["line"]:
        return position["file"]
    if not position["function"]:
        return _("%(file)s, line %(line)s") % position
    return _("%(file)s, line %(line)s, in %(function)s") % position


def _refusal_sentence(data: Mapping[str, Any]) -> str:
    """Return why the cluster refused the run. `data` has the `field` of InvalidSpec."""
    return str(
        REFUSAL_SENTENCES.get(str(data.get("field")), _("The cluster can't run this with its current settings."))
    )


def _out_of_memory_sentence(data: Mapping[str, Any]) -> str:
    limit = data.get("limit_mib")
    if limit is None:
        return _("Node %(node)s ran out of memory.") % {"node": data["node"]}
    return _("Node %(node)s exceeded its memory limit of %(limit)s MiB.") % {"node": data["node"], "limit": limit}


def _too_many_processes_sentence(data: Mapping[str, Any]) -> str:
    # `tasks`: how many processes ran when the launcher got no CPU time.
    if data.get("tasks") is not None:
        return _("Node %(node)s ran %(tasks)s processes at once, which left no CPU time for anything else.") % data
    if data.get("limit") is None:
        return _("Node %(node)s could not start another process or thread: it reached its limit.") % data
    return _("Node %(node)s exceeded its limit of %(limit)s processes.") % data


def _disk_full_sentence(data: Mapping[str, Any]) -> str:
    if "free_mib" in data:  # set only if something else has filled the disk, which is a fault of the platform
        return _("The disk of a machine is full, but not because of this run.")
    if (limit := data.get("limit_mib")) is None:
        return _("The run exceeded its disk limit.")
    if data.get("by_quota"):  # the limit is what was left of the storage quota, which is less than the disk limit
        return _("The run wrote more than the %(limit)s MiB left in your storage quota.") % {"limit": limit}
    return _("The run exceeded its disk limit of %(limit)s MiB.") % {"limit": limit}


def _hang_sentence(data: Mapping[str, Any]) -> str:
    """Return how long no rank made progress and, if known, which rank the others wait for, and where that rank is."""
    seconds = data.get("seconds")
    if seconds is None:
        return _("No rank made progress.")
    sentence = _("No rank made progress for %(seconds)d seconds.") % {"seconds": float(seconds)}
    if not data.get("where") or data.get("rank") is None:
        return sentence
    cause = _("Rank %(rank)s is in %(where)s; the other ranks wait for it.")
    return join_sentences(sentence, cause % {"rank": data["rank"], "where": str(data["where"])[:MAX_PLACE_LENGTH]})


_SENTENCE_FUNCTIONS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    FailureCode.REFUSED: _refusal_sentence,
    FailureCode.RANK_RAISED: _exception_sentence,
    FailureCode.OUT_OF_MEMORY: _out_of_memory_sentence,
    FailureCode.TOO_MANY_PROCESSES: _too_many_processes_sentence,
    FailureCode.DISK_FULL: _disk_full_sentence,
    FailureCode.HUNG: _hang_sentence,
}
"""Functions for failures with more than one sentence. They get the failure's data, with its `rank` and `node`."""


def terms_sentences(purchase: Mapping[str, Any]) -> list[str]:
    """Return sentences on how retries, minimum nodes and hang policy of a quote's purchase affect the price."""
    sentences = []
    if retries := int(purchase.get("retries") or 0):
        sentences.append(
            ngettext(
                "%(retries)d retry is included. Each attempt is charged for its own time. All attempts "
                "together never cost more than the ceiling, so the next attempt can use only what is "
                "left.",
                "%(retries)d retries are included. Each attempt is charged for its own time. All "
                "attempts together never cost more than the ceiling, so the next attempt can use only "
                "what is left.",
                retries,
            )
            % {"retries": retries}
        )
    if least := int(purchase.get("min_nodes") or 0):
        sentence = _(
            "The run can start and continue with %(least)d of %(nodes)d nodes. Nodes that do not run "
            "cost nothing, and with fewer nodes the ceiling covers more time."
        )
        sentences.append(sentence % {"least": least, "nodes": purchase["nodes"]})
    if purchase.get("on_hang") == OnHang.IGNORE:
        sentences.append(_("Hang detection is off: time without progress is charged like any other time."))
    return sentences


def waiting_sentence(code: str, data: Mapping[str, Any], *, nodes: int, spec: str, ahead: int) -> str:
    """Return why a queued job waits, its place in the queue, and what could start now instead.

    `code` and `data` are those of `waiting.WaitingReason`. `nodes` is the number of nodes that the job needs to start,
    `spec` the title of its node spec, `ahead` the number of jobs before it.
    """
    place_in_queue = _("You're next in the queue.")
    if ahead:
        place_in_queue = ngettext("%(ahead)d job is ahead of yours.", "%(ahead)d jobs are ahead of yours.", ahead) % {
            "ahead": ahead
        }
    if code in {"capacity", "too_large"}:
        return _capacity_sentence(code, data, nodes=nodes, spec=spec, place_in_queue=place_in_queue)
    if code == "reserved":
        return join_sentences(
            _("The cluster is reserving capacity for a larger run that has waited longest."), place_in_queue
        )
    if code == "quota":
        return _quota_sentence(int(data.get("running", 0)), int(data.get("most", 0)), nodes)
    if code in QUEUE_SENTENCES:
        return str(QUEUE_SENTENCES[code]) % data
    if code in {"retry", "backoff"}:
        return join_sentences(retry_sentence(data), _retry_time_sentence(data) or place_in_queue)
    return _("It starts shortly.") if ahead == 0 else place_in_queue


def _quota_sentence(running: int, most: int, nodes: int) -> str:
    """Return the sentence for a job that needs `nodes` nodes, of an organization that runs `running` of `most`."""
    if most < nodes:  # an administrator has lowered the quota since the order
        sentence = _(
            "Your organization can run at most %(most)d nodes at once, and this run needs %(nodes)d. Ask the "
            "administrator to raise the limit, or cancel the run at no further cost."
        )
    else:
        sentence = _(
            "Your organization is using %(running)d of its %(most)d nodes, and this run needs %(nodes)d "
            "more. It starts when one of your other runs ends."
        )
    return sentence % {"running": running, "most": most, "nodes": nodes}


def unanswered_sentence() -> str:
    """Return the sentence for a run whose cluster does not answer."""
    return str(QUEUE_SENTENCES["backend_unavailable"])


class _WithEllipsis(dict[str, Any]):
    """Values that a sentence contains. An ellipsis replaces missing and empty ones."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({name: "…" if value is None or value == "" else value for name, value in values.items()})

    def __missing__(self, name: str) -> str:
        return "…"


def starting_sentence(code: str, data: Mapping[str, Any], *, has_cost: bool = False) -> str:
    """Return what a submitted run waits for, and what to do. `code` is a WaitingCode, `data` its values.

    `has_cost`: earlier attempts of the job have a cost.
    """
    if code in {WaitingCode.CPUS, WaitingCode.MEMORY, WaitingCode.GPUS}:
        reason = _free_machines_sentence(code, data)
    elif code == WaitingCode.STARTING:
        reason = str(STEP_SENTENCES.get(str(data.get("step")), _("Capacity is allocated. The nodes are starting.")))
    else:
        reason = str(WAITING_SENTENCES.get(code, _("Capacity is allocated. The nodes are starting."))) % _WithEllipsis(
            data
        )
    return join_sentences(reason, "" if has_cost else _("Nothing is charged yet."))


def _free_machines_sentence(code: str, data: Mapping[str, Any]) -> str:
    """Return the sentence for a run that waits for free CPUs, memory or GPUs."""
    values = _WithEllipsis(data)
    if code == WaitingCode.GPUS:
        kind = str(data.get("gpu_type") or "GPU")  # any GPU, if the node spec names no type
        sentence = _("Waiting for %(wanted)s × %(kind)s on each of %(nodes)s nodes. Free now: %(free)s.")
        reason = sentence % _WithEllipsis({**data, "kind": kind})
    elif code == WaitingCode.CPUS:
        sentence = _(
            "Waiting for %(wanted)s cores on each of %(nodes)s nodes. The machine with the most has %(free)s free."
        )
        reason = sentence % values
    else:
        sentence = _(
            "Waiting for %(wanted)s MiB of memory on each of %(nodes)s nodes. The machine with the most "
            "has %(free)s free."
        )
        reason = sentence % values
    return join_sentences(
        reason, _("The run starts when they are free. A smaller node spec or fewer nodes may start sooner.")
    )


def retry_sentence(data: Mapping[str, Any]) -> str:
    """Return why a job is retried, and who pays for the last attempt.

    `data` has that attempt's end `reason`, and `is_moved` if an administrator ended it.
    """
    if data.get("is_moved"):
        return _("An administrator ended the last attempt, so that another one starts. That attempt is free.")
    sentences = {
        EndReason.CODE_FAILED: _(
            "The last attempt failed with an error in the code. The run is retried, as you ordered."
        ),
        EndReason.OUT_OF_MEMORY: _("The last attempt ran out of memory. The run is retried, as you ordered."),
        EndReason.HUNG: _("The last attempt hung. The run is retried, as you ordered."),
        EndReason.NO_CAPACITY: _(
            "The cluster could not place all nodes at once. That attempt is free, and the run is retried."
        ),
    }
    # All other reasons that lead to a retry are platform faults.
    platform_fault = _("The platform lost the last attempt. That attempt is free, and the run is restarted.")
    return sentences.get(EndReason(str(data["reason"])), platform_fault) if data.get("reason") else platform_fault


def _retry_time_sentence(data: Mapping[str, Any]) -> str:
    """Return when the next attempt starts, in the reader's time zone and format; empty if it need not wait."""
    if not data.get("at"):
        return ""
    moment = timezone.localtime(datetime.fromisoformat(str(data["at"])))
    time = f"{formats.time_format(moment, 'H:i:s')} {abbreviation(moment)}"
    return _("The next attempt starts after %(time)s.") % {"time": time}


def _capacity_sentence(code: str, data: Mapping[str, Any], *, nodes: int, spec: str, place_in_queue: str) -> str:
    """Return the sentence for a queued job whose cluster has too few free machines, or is too small."""
    if code == "too_large":
        most = int(data.get("most", 0))
        reason = (
            _("The cluster is now too small for %(nodes)d nodes of %(spec)s. It can hold at most %(most)d.")
            if most
            else _("The cluster no longer has a machine that is large enough for a node of %(spec)s.")
        ) % {"nodes": nodes, "spec": spec, "most": most}
        return join_sentences(
            reason, _("The run starts when the cluster grows again. You can cancel it at no further cost.")
        )
    if "free" not in data:  # the cluster refused the run, and reported no number
        reason = ngettext(
            "Waiting for %(nodes)d free node of %(spec)s.", "Waiting for %(nodes)d free nodes of %(spec)s.", nodes
        ) % {"nodes": nodes, "spec": spec}
        return join_sentences(reason, place_in_queue)
    free = int(data["free"])
    reason = ngettext(
        "Waiting for %(nodes)d free node of %(spec)s;", "Waiting for %(nodes)d free nodes of %(spec)s;", nodes
    ) % {"nodes": nodes, "spec": spec}
    free_now = ngettext("%(free)d is free now.", "%(free)d are free now.", free) % {"free": free}
    instead = _("A run on %(free)d of them would start now.") % {"free": free} if free else ""
    return join_sentences(reason, free_now, place_in_queue, instead)


def straggler_sentence(straggler: Straggler) -> str:
    """Return which rank is slow, and by how much."""
    sentence = _(
        "Rank %(rank)d on node %(node)d is slow: its compute time per step is %(ratio)s times that of "
        "the median rank, and the other ranks wait for it."
    )
    ratio = formats.number_format(round(straggler.ratio, 1), 1)
    return sentence % {"rank": straggler.rank, "node": straggler.node, "ratio": ratio}


def efficiency_sentence(efficiency: Efficiency) -> str:
    """Return the scaling efficiency, and the run that it is compared with."""
    by_steps = _(
        "Scaling efficiency %(percent)d %%: %(nodes)d nodes process %(times)s times as much data per "
        "second as one node in job #%(job)d."
    )
    by_epochs = _(
        "Scaling efficiency %(percent)d %%: %(nodes)d nodes complete %(times)s times as many epochs per "
        "second as one node in job #%(job)d."
    )
    return (by_steps if efficiency.by == "steps" else by_epochs) % {
        "percent": round(100 * efficiency.value),
        "nodes": efficiency.nodes,
        "times": formats.number_format(round(efficiency.value * efficiency.nodes, 1), 1),
        "job": efficiency.job_id,
    }


FREE_EVENT_SENTENCES = {
    "ordered": gettext_lazy("Ordered. This run is free."),
    "settled": gettext_lazy("Nothing was charged: this run is free."),
}
"""For jobs that can cost nothing, these replace the sentences of events that mention a hold or a charge."""


def event_sentence(
    kind: str,
    data: Mapping[str, Any],
    *,
    is_free: bool = False,
    costs_nothing: bool = False,
    is_notebook: bool = False,
) -> str:
    """Return the sentence for a JobEvent. `kind` is a JobState, or the kind of another event below.

    `is_free`: nothing was charged. `costs_nothing`: nothing can be charged, as for a free estimate. `is_notebook` is as
    for `end_sentence`.

    `kind` does not tell a retry or an end from other changes of state, so `data` decides about these two.
    """
    if costs_nothing and kind in FREE_EVENT_SENTENCES:
        return str(FREE_EVENT_SENTENCES[kind])
    if kind == "settled":
        return _("Charged %(amount)s. The rest of the hold was released.") % {
            "amount": money(int(data["total_minor"]), str(data["currency"]))
        }
    failure = failure_sentence(data["failure"]) if data.get("failure") else ""
    if data.get("retry"):
        # The failure of a moved attempt says the same.
        return join_sentences("" if data.get("is_moved") else failure, retry_sentence(data))
    if data.get("reason"):
        is_hang_charged = pays_for_hang(data.get("failure"))
        end = end_sentence(
            str(data["reason"]), is_hang_charged=is_hang_charged, is_free=is_free, is_notebook=is_notebook
        )
        return join_sentences(end, failure)
    if kind == "extended":
        return _("Extended: %(amount)s more are held in the wallet.") % {
            "amount": money(int(data["amount_minor"]), str(data["currency"]))
        }
    sentences = {
        "ordered": _("Ordered. The ceiling is held in the wallet."),
        # From `lifecycle.return_to_queue`; the events of retries were handled above.
        "queued": _("Back in the queue: another run took the capacity first."),
        "installing": _("The packages of %(path)s are installed first.") % {"path": data.get("path", "")},
        "starting": _("Capacity is allocated. The nodes are starting."),
        "running": join_sentences(
            running_sentence(data.get("nodes", 0), data.get("of_nodes", 0)),
            "" if costs_nothing else _("Charging starts now."),
        ),
        "stopping": stopping_sentence(has_started=data.get("has_started", True), is_notebook=is_notebook),
        "runs_snapshot": _("The script %(path)s was changed after the order. The job runs a copy of the ordered one.")
        % {"path": data.get("path", "")},
        "stopped_by_operator": operator_stop_sentence(str(data.get("why", ""))),
        "moved_by_operator": _(
            "An administrator is moving this job. The code has a short time to write a checkpoint: %(why)s"
        )
        % {"why": data.get("why", "")},
    }
    return sentences.get(kind, kind)


def operator_stop_sentence(why: str) -> str:
    """Return that an administrator stopped a job, and why."""
    return _("An administrator stopped this job: %(why)s") % {"why": why}


def running_sentence(nodes: int, of_nodes: int) -> str:
    """Return on how many of the ordered nodes a job runs; an elastic one may have fewer."""
    if nodes < of_nodes:
        return _("Running on %(nodes)d of %(of_nodes)d nodes.") % {"nodes": nodes, "of_nodes": of_nodes}
    return _("Running on all nodes.")


def stopping_sentence(*, has_started: bool, is_notebook: bool) -> str:
    """Return what happens to a run that is being cancelled. `has_started`: its code is known to run.

    Without that, nothing is said about the code, because it may run before its start is observed.
    """
    if is_notebook:
        return _("JupyterLab is stopping.")
    if not has_started:
        return _("Cancelling.")
    return _("Cancelling. Your code has a short time to write a checkpoint.")


def join_sentences(*sentences: str) -> str:
    """Join the non-empty sentences as the reader's language does: in Chinese, with a zero-width space."""
    return pgettext("between sentences", " ").join(sentence for sentence in sentences if sentence)
