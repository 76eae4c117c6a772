"""What an order says about failing: retries, hangs, fewer nodes, how the ranks talk. Read and checked here.

The one rule: everything left out means what a run without any of it did: no retry, all nodes, the framework's defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _

from billing.models import NodeSpec
from jobs import fields
from jobs.backend import cluster, image_of
from jobs.states import OnHang
from runtime.errors import InvalidSpec, RuntimeFault
from runtime.specs import Controller, Framework
from storage.models import Image

MOST_RETRIES = 5
USUAL_BACKOFF_SECONDS = 30
LONGEST_BACKOFF_SECONDS = 3600
LEAST_TIMEOUT_SECONDS = 5
LONGEST_TIMEOUT_SECONDS = 24 * 3600
ELASTIC = frozenset({Framework.PYTORCH, Framework.HOROVOD})
"""Frameworks whose runs can start, and go on, with fewer nodes."""


@dataclass(frozen=True)
class Resilience:
    """What was bought of it; the fields are the API's and the job's columns. Seconds; 0: the framework's own."""

    retries: int = 0
    retry_backoff_seconds: int = 0
    on_hang: OnHang = OnHang.STOP
    min_nodes: int = 0
    """An elastic run starts and goes on with as few; 0: all are needed."""
    controller: Controller = Controller.GLOO
    collective_timeout_seconds: int = 0
    stall_check_seconds: int = 0

    def to_json(self) -> dict[str, Any]:
        """As plain names and numbers."""
        return vars(self) | {"on_hang": self.on_hang.value, "controller": self.controller.value}


def read_resilience(
    reader: fields.Reader,
    *,
    framework: Framework | None,
    image: Image | None,
    spec: NodeSpec | None,
    nodes: int | None,
) -> Resilience:
    """Read the fields; what is wrong with one is left with the reader. What is None was at fault itself."""
    retries = reader.field("retries", lambda value: fields.optional(value, 0, MOST_RETRIES)) or 0
    backoff = reader.field("retry_backoff_seconds", lambda value: fields.optional(value, 0, LONGEST_BACKOFF_SECONDS))
    usual = USUAL_BACKOFF_SECONDS if backoff is None else backoff
    controller = reader.field("controller", lambda value: _controller(framework, image, spec, value))
    return Resilience(
        retries=retries,
        retry_backoff_seconds=usual if retries else 0,
        on_hang=reader.field("on_hang", lambda value: _on_hang(retries, value)) or OnHang.STOP,
        min_nodes=reader.field("min_nodes", lambda value: _min_nodes(framework, nodes, value)) or 0,
        controller=controller or Controller.GLOO,
        collective_timeout_seconds=reader.field("collective_timeout_seconds", _timeout) or 0,
        stall_check_seconds=reader.field("stall_check_seconds", lambda value: _stall_check(framework, value)) or 0,
    )


def _on_hang(retries: int, value: Any) -> OnHang:
    try:
        policy = OnHang.STOP if fields.is_empty(value) else OnHang(fields.name(value))
    except ValueError:
        raise ValueError(_("Choose one of these: %(known)s.") % {"known": ", ".join(OnHang)}) from None
    if policy is OnHang.RETRY and not retries:
        raise ValueError(_("To try again after a hang, buy at least one retry."))
    return policy


def _min_nodes(framework: Framework | None, nodes: int | None, value: Any) -> int:
    least = fields.optional(value, 0, nodes or 1000) or 0
    if least in {0, nodes}:
        return 0
    if framework and framework not in ELASTIC:
        raise ValueError(_("TensorFlow needs all its nodes. Leave the least number of nodes empty."))
    return least


def _controller(framework: Framework | None, image: Image | None, spec: NodeSpec | None, value: Any) -> Controller:
    try:
        controller = Controller.GLOO if fields.is_empty(value) else Controller(fields.name(value))
    except ValueError:
        raise ValueError(_("Choose one of these: %(known)s.") % {"known": ", ".join(Controller)}) from None
    if controller is Controller.GLOO:
        return controller
    if framework and framework is not Framework.HOROVOD:
        raise ValueError(_("MPI is for Horovod. Choose Gloo for this framework."))
    if image and spec:
        try:
            cluster(spec.cluster).check_image(image_of(image), controller)
        except InvalidSpec as error:
            if error.field == "controller":
                sentence = _("The image %(image)s has no MPI. Choose Gloo, or an image that carries mpirun.")
                raise ValueError(sentence % {"image": image.name}) from None
        except RuntimeFault:
            pass  # whether it can run is seen when the job is dispatched
    return controller


def _timeout(value: Any) -> int:
    return fields.or_zero(value, LEAST_TIMEOUT_SECONDS, LONGEST_TIMEOUT_SECONDS)


def _stall_check(framework: Framework | None, value: Any) -> int:
    seconds = fields.or_zero(value, LEAST_TIMEOUT_SECONDS, LONGEST_TIMEOUT_SECONDS)
    if seconds and framework and framework is not Framework.HOROVOD:
        raise ValueError(_("The stall check is Horovod's. Leave it empty for this framework."))
    return seconds
