"""The words for jobs: why one waits, what happened, why it ended and who pays.

Made when read, in the reader's language.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from django.utils import formats, timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, pgettext

from billing.wording import money
from jobs.samples import Efficiency, Straggler
from jobs.states import EndReason, OnHang
from runtime.specs import FailureCode, WaitingCode


class Cause(enum.StrEnum):
    """What a run failed of before or outside the cluster; `FailureCode` has the cluster's own."""

    REFUSED = "refused"
    """The cluster can't run it as it is; `data` has the field at fault."""
    NOT_STARTED = "not_started"
    VANISHED = "vanished"


LONGEST_PLACE = 200
"""Of where a rank stands: the name of a file is the customer's."""
END_SENTENCES = {
    EndReason.COMPLETED: gettext_lazy("The run completed."),
    EndReason.CODE_FAILED: gettext_lazy("Your code ended with an error. The time used is charged."),
    EndReason.OUT_OF_MEMORY: gettext_lazy(
        "The run used more memory than its nodes have. Choose a larger node spec or a smaller batch. "
        "The time used is charged."
    ),
    EndReason.DISK_FULL: gettext_lazy(
        "The run wrote more than its nodes' disks hold. Write less, or delete old checkpoints as it goes. "
        "The time used is charged."
    ),
    EndReason.HUNG: gettext_lazy(
        "The run hung: no output, no metrics and no work were seen any more. It is charged up to its last sign of "
        "progress; the time it hung is free."
    ),
    EndReason.CANCELLED: gettext_lazy("The run was cancelled. Only the time it used until then is charged."),
    EndReason.TIME_LIMIT: gettext_lazy(
        "The run reached its time limit and was ended there, so that its ceiling was kept. The time used is charged."
    ),
    EndReason.NO_CAPACITY: gettext_lazy("The cluster had no room for the run. It costs nothing."),
    EndReason.NODE_LOST: gettext_lazy("The platform lost a node of the run. It costs nothing."),
    EndReason.PLATFORM_ERROR: gettext_lazy("The platform failed to run this. It costs nothing."),
}


def end_sentence(reason: str) -> str:
    """Why a job ended, and who pays."""
    return str(END_SENTENCES[EndReason(reason)]) if reason else ""


FAILURE_SENTENCES: dict[str, Any] = {
    FailureCode.STOPPED: gettext_lazy("The run was stopped."),
    FailureCode.TIME_LIMIT: gettext_lazy("The run reached its time limit."),
    FailureCode.NODE_LOST: gettext_lazy("Node %(node)s was lost: its supervisor ended, or its machine went down."),
    FailureCode.NODE_SILENT: gettext_lazy("Node %(node)s stopped answering: it froze, or was cut off from the others."),
    FailureCode.NODE_NOT_STARTED: gettext_lazy("Node %(node)s did not start."),
    FailureCode.NODES_NOT_MET: gettext_lazy("The nodes did not find each other in time."),
    FailureCode.NODES_NOT_PLACED: gettext_lazy(
        "The cluster had room for %(placed)s of %(nodes)s nodes only, and the run needs all of them at once. They were "
        "given back."
    ),
    FailureCode.EVICTED: gettext_lazy("The cluster took node %(node)s away: drained, or short of memory or disk."),
    FailureCode.PREEMPTED: gettext_lazy("Node %(node)s had to give way to work of higher priority."),
    FailureCode.IMAGE_NAME: gettext_lazy("There is no image %(image)s. Check its name and its tag."),
    FailureCode.IMAGE_CREDENTIALS: gettext_lazy(
        "The registry does not hand out the image %(image)s. Check the user name and password stored for it."
    ),
    FailureCode.IMAGE_NETWORK: gettext_lazy("The registry of the image %(image)s could not be reached."),
    FailureCode.IMAGE_UNUSABLE: gettext_lazy(
        "The image %(image)s has no Python where one was expected. Use an image with Python 3.8 or later."
    ),
    FailureCode.LAUNCHER_KILLED: gettext_lazy(
        "Code inside the run killed the process that watches over it. Signal only processes that it started itself."
    ),
    Cause.NOT_STARTED: gettext_lazy("The platform could not start the run."),
    Cause.VANISHED: gettext_lazy("The cluster no longer knows this run."),
}
"""What is always the same sentence. A figure that the cluster did not tell is shown as three dots."""
STEPS = {
    "place": gettext_lazy("The cluster is finding machines for the nodes."),
    "image": gettext_lazy("The image is being pulled to the nodes."),
    "volume": gettext_lazy("Workspace and datasets are being attached to the nodes."),
}
"""What is under way, of a run that waits for nothing else."""
WAITING_SENTENCES: dict[str, Any] = {
    WaitingCode.IMAGE_NAME: gettext_lazy(
        "There is no image %(image)s. Check its name and its tag on the Images page, cancel this run and order it anew."
    ),
    WaitingCode.IMAGE_CREDENTIALS: gettext_lazy(
        "The registry does not hand out the image %(image)s. Have the user name and password that are stored for this "
        "registry corrected; it is tried again by itself."
    ),
    WaitingCode.IMAGE_NETWORK: gettext_lazy(
        "The registry of the image %(image)s can't be reached from the cluster. It is tried again by itself; if this "
        "lasts, tell the administrator."
    ),
    WaitingCode.VOLUME: gettext_lazy(
        "The storage of the run can't be attached to its nodes yet. If this lasts, tell the administrator: volume "
        "%(claim)s."
    ),
    WaitingCode.QUOTA: gettext_lazy(
        "The cluster's quota is used up. It starts when another run of your organization ends; for more at once, ask "
        "the administrator."
    ),
    WaitingCode.TOO_LARGE: gettext_lazy(
        "The cluster has no machine that can hold a node of this run, were it empty. It starts when the cluster grows; "
        "you can cancel it, which costs nothing."
    ),
    WaitingCode.TAINT: gettext_lazy(
        "The machines that would fit are kept for others, or are not ready. If this lasts, tell the administrator: "
        "taint %(taint)s."
    ),
    WaitingCode.ADMISSION: gettext_lazy(
        "The cluster has not admitted the run yet: it starts all its nodes at once, as soon as its queue lets it."
    ),
    WaitingCode.UNSCHEDULABLE: gettext_lazy(
        "No machine of the cluster takes the nodes of this run now. If this lasts, tell the administrator: %(detail)s"
    ),
}
"""Why a run that was accepted does not run yet, each with what to do."""
REFUSALS = {
    "script": gettext_lazy("The script is no longer in the workspace."),
    "mounts": gettext_lazy("A folder of the run is no longer there: its workspace, or one of its datasets."),
    "image": gettext_lazy("The image can't be used on this cluster now."),
    "controller": gettext_lazy("The image has no MPI on this cluster."),
}


def cause(code: Cause, message: str, **data: Any) -> dict[str, Any]:
    """A failure that the cluster did not tell, in the shape of `runtime.specs.Failure`; `message` is for logs."""
    nowhere: dict[str, Any] = {"node": None, "rank": None, "exit_code": None, "signal": "", "last_lines": []}
    return {"message": message, "code": code.value, "data": data, **nowhere}


def failure_sentence(failure: Mapping[str, Any]) -> str:
    """The first cause of a failed attempt (`runtime.specs.Failure` as plain data), in the reader's language."""
    code, data = str(failure.get("code", "")), dict(failure.get("data") or {})
    who = {"rank": failure.get("rank"), "node": failure.get("node")}
    if special := _SPECIAL.get(code):
        return special(who | data)
    if sentence := FAILURE_SENTENCES.get(code):
        return str(sentence) % _Known(who | data)
    return _of_a_rank(who, failure) or _("The platform failed while it ran this.")


def _of_a_rank(who: Mapping[str, Any], failure: Mapping[str, Any]) -> str:
    if who["rank"] is not None and failure.get("signal"):
        return _("Rank %(rank)s on node %(node)s was ended by %(signal)s.") % {**who, "signal": failure["signal"]}
    if who["rank"] is not None and failure.get("exit_code") is not None:
        return _("Rank %(rank)s on node %(node)s exited with code %(code)s.") % {**who, "code": failure["exit_code"]}
    return ""


def _refused(data: Mapping[str, Any]) -> str:
    return str(REFUSALS.get(str(data.get("field")), _("The cluster can't run this as it is.")))


def _out_of_memory(data: Mapping[str, Any]) -> str:
    limit = data.get("limit_mib")
    if limit is None:
        return _("Node %(node)s ran out of memory.") % {"node": data["node"]}
    return _("Node %(node)s used more than its %(limit)s MiB of memory.") % {"node": data["node"], "limit": limit}


def _too_many_processes(data: Mapping[str, Any]) -> str:
    if data.get("tasks") is not None:
        return _("Node %(node)s ran %(tasks)s processes at once, which left no time for anything else on it.") % data
    if data.get("limit") is None:
        return _("Node %(node)s was refused another process or thread: it had as many as it may.") % {
            "node": data["node"]
        }
    return _("Node %(node)s started more processes than the %(limit)s it may.") % data


def _disk_full(data: Mapping[str, Any]) -> str:
    if "free_mib" in data:
        return _("The disk of a machine is full, and not by this run.")
    if (limit := data.get("limit_mib")) is None:
        return _("The run wrote more than its disk holds.")
    return _("The run wrote more than the %(limit)s MiB of disk that it may.") % {"limit": limit}


def _hung(data: Mapping[str, Any]) -> str:
    seconds = data.get("seconds")
    if seconds is None:
        return _("No rank showed any sign of progress any more.")
    told = _("No rank showed any sign of progress for %(seconds)d seconds.") % {"seconds": float(seconds)}
    if not data.get("where") or data.get("rank") is None:
        return told
    culprit = _("The others wait for rank %(rank)s, which is in %(where)s.")
    return joined(told, culprit % {"rank": data["rank"], "where": str(data["where"])[:LONGEST_PLACE]})


_SPECIAL: dict[str, Callable[[Mapping[str, Any]], str]] = {
    Cause.REFUSED: _refused,
    FailureCode.OUT_OF_MEMORY: _out_of_memory,
    FailureCode.TOO_MANY_PROCESSES: _too_many_processes,
    FailureCode.DISK_FULL: _disk_full,
    FailureCode.HUNG: _hung,
}


def terms_sentences(purchase: Mapping[str, Any]) -> list[str]:
    """What a purchase's retries, hangs and fewer nodes mean for its price."""
    told = []
    if retries := int(purchase.get("retries") or 0):
        told.append(
            ngettext(
                "%(retries)d retry is included. Each attempt pays for its own time; all together never cost more than "
                "the ceiling, so the next one gets what is left of it.",
                "%(retries)d retries are included. Each attempt pays for its own time; all together never cost more "
                "than the ceiling, so the next one gets what is left of it.",
                retries,
            )
            % {"retries": retries}
        )
    if least := int(purchase.get("min_nodes") or 0):
        sentence = _(
            "It may start, and go on, with %(least)d of %(nodes)d nodes. Nodes that do not run cost nothing, and the "
            "time that the ceiling covers grows as they are fewer."
        )
        told.append(sentence % {"least": least, "nodes": purchase["nodes"]})
    if purchase.get("on_hang") == OnHang.IGNORE:
        told.append(_("Hangs are not watched for: time in which nothing happens is charged as any other."))
    return told


def waiting_sentence(code: str, data: Mapping[str, Any], *, nodes: int, spec: str, ahead: int) -> str:
    """Why a job waits, its place in the queue, and what would start now instead."""
    place = ngettext("%(ahead)d job is before it.", "%(ahead)d jobs are before it.", ahead) % {"ahead": ahead}
    if code in {"capacity", "too_large"}:
        return _for_room(code, data, nodes=nodes, spec=spec, place=place)
    if code == "reserved":
        return joined(_("The cluster is being kept free for a larger run that has waited longest."), place)
    if code == "quota":
        return _(
            "Your organization runs %(running)d nodes of the %(most)d it may; this run needs %(nodes)d more. "
            "It starts when one of your other runs ends."
        ) % {"running": data.get("running", 0), "most": data.get("most", 0), "nodes": nodes}
    if code == "backend_unavailable":
        return unanswered_sentence()
    if code in {"retry", "backoff"}:
        return joined(again_sentence(data), _not_before(data) or place)
    return _("It starts in a moment.") if ahead == 0 else place


def unanswered_sentence() -> str:
    """Of a run whose cluster is away."""
    return _("The cluster does not answer at the moment. The run starts as soon as it does.")


class _Known(dict[str, Any]):
    """Figures for a sentence; one that the cluster did not tell is three dots."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        super().__init__({name: "…" if value is None or value == "" else value for name, value in told.items()})

    def __missing__(self, name: str) -> str:
        return "…"


def starting_sentence(code: str, data: Mapping[str, Any]) -> str:
    """What the nodes of a run still wait for (`runtime.specs.WaitingCode`), and what to do about it."""
    if code in {WaitingCode.CPUS, WaitingCode.MEMORY, WaitingCode.GPUS}:
        why = _for_machines(code, data)
    elif code == WaitingCode.STARTING:
        why = str(STEPS.get(str(data.get("step")), _("A place was found; the nodes are starting.")))
    else:
        why = str(WAITING_SENTENCES.get(code, _("A place was found; the nodes are starting."))) % _Known(data)
    return joined(why, _("Nothing is charged yet."))


def _for_machines(code: str, data: Mapping[str, Any]) -> str:
    known = _Known(data)
    if code == WaitingCode.GPUS:
        kind = str(data.get("gpu_type") or "GPU")
        sentence = _("Waiting for %(wanted)s × %(kind)s on each of %(nodes)s nodes; %(free)s are free now.")
        why = sentence % _Known({**data, "kind": kind})
    elif code == WaitingCode.CPUS:
        sentence = _(
            "Waiting for %(wanted)s cores on each of %(nodes)s nodes; the machine that has most has %(free)s free."
        )
        why = sentence % known
    else:
        sentence = _(
            "Waiting for %(wanted)s MiB of memory on each of %(nodes)s nodes; the machine that has most has %(free)s "
            "free."
        )
        why = sentence % known
    return joined(why, _("It starts as soon as they are; a smaller node spec or fewer nodes may start sooner."))


def again_sentence(data: Mapping[str, Any]) -> str:
    """Why an attempt is made again, and who pays for the one before."""
    sentences = {
        EndReason.CODE_FAILED: _(
            "The last attempt ended with an error of the code. It is tried again, as you ordered."
        ),
        EndReason.OUT_OF_MEMORY: _("The last attempt ran out of memory. It is tried again, as you ordered."),
        EndReason.HUNG: _("The last attempt hung. It is tried again, as you ordered."),
        EndReason.NO_CAPACITY: _(
            "The cluster could not place all nodes at once, which costs nothing. It is tried again."
        ),
    }
    free = _("The platform lost the last attempt, which costs nothing. It is started again.")
    return sentences.get(EndReason(str(data["reason"])), free) if data.get("reason") else free


def _not_before(data: Mapping[str, Any]) -> str:
    """Until when a retry waits, as the reader writes times."""
    if not data.get("at"):
        return ""
    moment = timezone.localtime(datetime.fromisoformat(str(data["at"])))
    return _("It waits until %(time)s, and then tries again.") % {"time": formats.time_format(moment, "H:i:s")}


def _for_room(code: str, data: Mapping[str, Any], *, nodes: int, spec: str, place: str) -> str:
    if code == "too_large":
        most = int(data.get("most", 0))
        why = (
            _("The cluster has become too small for %(nodes)d nodes of %(spec)s: it could hold %(most)d.")
            if most
            else _("The cluster has no machine any more that can hold a node of %(spec)s.")
        ) % {"nodes": nodes, "spec": spec, "most": most}
        return joined(why, _("The run starts when the cluster grows again. You can cancel it, which costs nothing."))
    free = int(data.get("free", 0))
    why = ngettext(
        "Waiting for %(nodes)d free node of %(spec)s;", "Waiting for %(nodes)d free nodes of %(spec)s;", nodes
    ) % {"nodes": nodes, "spec": spec}
    now = ngettext("%(free)d is free now.", "%(free)d are free now.", free) % {"free": free}
    instead = _("A run on %(free)d of them would start now.") % {"free": free} if free else ""
    return joined(why, now, place, instead)


def straggler_sentence(straggler: Straggler) -> str:
    """Which rank the others wait for."""
    sentence = _(
        "Rank %(rank)d on node %(node)d is slow: it computes %(ratio)s times as long for a step as the median rank, "
        "and the others wait for it."
    )
    ratio = formats.number_format(round(straggler.ratio, 1), 1)
    return sentence % {"rank": straggler.rank, "node": straggler.node, "ratio": ratio}


def efficiency_sentence(efficiency: Efficiency) -> str:
    """How well a run scales, and against which run."""
    by_steps = _(
        "Scaling efficiency %(percent)d %%: %(nodes)d nodes train on %(times)s times the data per second that one "
        "node did in job #%(job)d."
    )
    by_epochs = _(
        "Scaling efficiency %(percent)d %%: %(nodes)d nodes do %(times)s times the epochs per second that one node "
        "did in job #%(job)d."
    )
    return (by_steps if efficiency.by == "steps" else by_epochs) % {
        "percent": round(100 * efficiency.value),
        "nodes": efficiency.nodes,
        "times": formats.number_format(round(efficiency.value * efficiency.nodes, 1), 1),
        "job": efficiency.job,
    }


def event_sentence(kind: str, data: Mapping[str, Any]) -> str:
    """What an event of a job says."""
    if kind == "settled":
        return _("Charged %(amount)s; the rest of the hold was released.") % {
            "amount": money(int(data["total_minor"]), str(data["currency"]))
        }
    failure = data.get("failure")
    told = failure_sentence(failure) if failure else ""
    if data.get("retry"):
        return joined(told, again_sentence(data))
    if data.get("reason"):
        return joined(end_sentence(str(data["reason"])), told)
    sentences = {
        "ordered": _("Ordered; the ceiling is held in the wallet."),
        "queued": _("Back in the queue: another run took the room first."),
        "starting": _("A place was found; the nodes are starting."),
        "running": _("All nodes run. The meter starts here."),
        "stopping": _("Cancelling: the code gets a moment to write a checkpoint."),
    }
    return sentences.get(kind, kind)


def joined(*sentences: str) -> str:
    """Sentences one after another; languages differ in what stands between them."""
    return pgettext("between sentences", " ").join(sentence for sentence in sentences if sentence)
