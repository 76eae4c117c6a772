"""The words for jobs: why one waits, what happened, why it ended and who pays.

Made when read, in the reader's language.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, pgettext

from billing.wording import money
from jobs.states import EndReason

END_SENTENCES = {
    EndReason.COMPLETED: gettext_lazy("The run completed."),
    EndReason.CODE_FAILED: gettext_lazy("Your code ended with an error. The time used is charged."),
    EndReason.OUT_OF_MEMORY: gettext_lazy(
        "The run used more memory than its nodes have. Choose a larger node spec or a smaller batch. "
        "The time used is charged."
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


def failure_sentence(failure: Mapping[str, Any]) -> str:
    """The first cause of a failed attempt (`runtime.specs.Failure` as plain data)."""
    who = {"rank": failure["rank"], "node": failure["node"]}
    if failure["rank"] is not None and failure["signal"]:
        return _("Rank %(rank)s on node %(node)s was ended by %(signal)s.") % {**who, "signal": failure["signal"]}
    if failure["rank"] is not None and failure["exit_code"] is not None:
        return _("Rank %(rank)s on node %(node)s exited with code %(code)s.") % {**who, "code": failure["exit_code"]}
    return str(failure["message"])


def waiting_sentence(code: str, data: Mapping[str, Any], *, nodes: int, spec: str, ahead: int) -> str:
    """Why a job waits, its place in the queue, and what would start now instead."""
    place = ngettext("%(ahead)d job is before it.", "%(ahead)d jobs are before it.", ahead) % {"ahead": ahead}
    if code in {"capacity", "too_large"}:
        return _for_room(code, data, nodes=nodes, spec=spec, place=place)
    if code == "reserved":
        return _joined(_("The cluster is being kept free for a larger run that has waited longest."), place)
    if code == "quota":
        return _(
            "Your organization runs %(running)d nodes of the %(most)d it may; this run needs %(nodes)d more. "
            "It starts when one of your other runs ends."
        ) % {"running": data.get("running", 0), "most": data.get("most", 0), "nodes": nodes}
    if code == "backend_unavailable":
        return _("The cluster does not answer at the moment. The run starts as soon as it does.")
    if code == "retry":
        return _joined(_("The platform lost the last attempt, which costs nothing. It is started again."), place)
    return _("It starts in a moment.") if ahead == 0 else place


def _for_room(code: str, data: Mapping[str, Any], *, nodes: int, spec: str, place: str) -> str:
    if code == "too_large":
        return _(
            "The cluster has become too small for %(nodes)d nodes of %(spec)s: it could hold %(most)d. "
            "If it does not grow again within minutes, the run ends and costs nothing."
        ) % {"nodes": nodes, "spec": spec, "most": data.get("most", 0)}
    free = int(data.get("free", 0))
    why = ngettext(
        "Waiting for %(nodes)d free node of %(spec)s;", "Waiting for %(nodes)d free nodes of %(spec)s;", nodes
    ) % {"nodes": nodes, "spec": spec}
    now = ngettext("%(free)d is free now.", "%(free)d are free now.", free) % {"free": free}
    instead = _("A run on %(free)d of them would start now.") % {"free": free} if free else ""
    return _joined(why, now, place, instead)


def event_sentence(kind: str, data: Mapping[str, Any]) -> str:
    """What an event of a job says."""
    if kind == "settled":
        return _("Charged %(amount)s; the rest of the hold was released.") % {
            "amount": money(int(data["total_minor"]), str(data["currency"]))
        }
    if data.get("retry"):
        return _("The platform lost the attempt: %(detail)s It is started again, free of charge.") % {
            "detail": data.get("detail", "")
        }
    if data.get("reason"):
        return _joined(end_sentence(str(data["reason"])), str(data.get("detail", "")))
    sentences = {
        "ordered": _("Ordered; the ceiling is held in the wallet."),
        "queued": _("Back in the queue: another run took the room first."),
        "starting": _("A place was found; the nodes are starting."),
        "running": _("All nodes run. The meter starts here."),
        "stopping": _("Cancelling: the code gets a moment to write a checkpoint."),
    }
    return sentences.get(kind, kind)


def _joined(*sentences: str) -> str:
    """Sentences one after another; languages differ in what stands between them."""
    return pgettext("between sentences", " ").join(sentence for sentence in sentences if sentence)
