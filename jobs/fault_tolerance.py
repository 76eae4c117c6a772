"""The fault tolerance of an order: retries, hangs, minimum nodes, controller (Gloo or MPI) and timeouts.

Empty fields mean no retry, all nodes and the framework's defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _
from rest_framework.serializers import ValidationError

from jobs.clusters import cluster, image_of
from jobs.fields import EnumField, FormSerializer, WholeNumberField
from jobs.states import OnHang
from runtime.errors import InvalidSpec, RuntimeFault
from runtime.specs import Controller, Framework

MAX_RETRIES = 5
"""Maximum retries. All attempts share one ceiling, so more would only leave less time for each."""
DEFAULT_BACKOFF_SECONDS = 30
"""Wait before the first retry, unless the order names another one: enough for a short disturbance to pass."""
MAX_BACKOFF_SECONDS = 3600
"""Longest wait before the first retry; it doubles before each further one (`lifecycle.MAX_BACKOFF`)."""
MIN_TIMEOUT_SECONDS = 5
"""Shortest timeout of a collective operation. On busy nodes or networks a collective regularly takes a few seconds."""
MAX_TIMEOUT_SECONDS = 24 * 3600
"""Longest timeout of a collective operation: far above any that scripts set."""
ELASTIC = frozenset({Framework.PYTORCH, Framework.HOROVOD})
"""Frameworks whose runs can start and continue with fewer nodes."""


@dataclass(frozen=True)
class FaultTolerance:
    """The fault tolerance of an order. The fields have the names of the API and of `Job`, where they are described."""

    retries: int = 0
    retry_backoff_seconds: int = 0
    on_hang: OnHang = OnHang.STOP
    min_nodes: int = 0
    controller: Controller = Controller.GLOO
    collective_timeout_seconds: int = 0
    stall_check_seconds: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as strings and numbers."""
        return vars(self) | {"on_hang": self.on_hang.value, "controller": self.controller.value}


class FaultToleranceSerializer(FormSerializer):
    """The fields of `FaultTolerance`, which are checked after framework, image, node spec and nodes.

    If one of those is invalid, it has an error of its own, and the checks here that need it are skipped.
    """

    retries = WholeNumberField(
        least=0, most=MAX_RETRIES, default=0, help_text="Retries if your code fails. All attempts share one ceiling."
    )
    retry_backoff_seconds = WholeNumberField(
        least=0,
        most=MAX_BACKOFF_SECONDS,
        default=DEFAULT_BACKOFF_SECONDS,
        help_text="Wait before the first retry; doubled before each further one.",
    )
    on_hang = EnumField(OnHang, default=OnHang.STOP)
    min_nodes = WholeNumberField(
        least=0,
        most=lambda values: values.get("nodes", 1000),  # any large number: invalid nodes have their own error
        default=0,
        help_text="An elastic run starts and continues with as few nodes as this. 0: all nodes.",
    )
    controller = EnumField(
        Controller,
        default=Controller.GLOO,
        help_text="`mpi` starts the ranks with the image's mpirun: for Horovod, and PyTorch in your own images.",
    )
    collective_timeout_seconds = WholeNumberField(
        least=MIN_TIMEOUT_SECONDS,
        most=MAX_TIMEOUT_SECONDS,
        allow_zero=True,
        default=0,
        help_text="0: the framework's own.",
    )
    stall_check_seconds = WholeNumberField(
        least=MIN_TIMEOUT_SECONDS,
        most=MAX_TIMEOUT_SECONDS,
        allow_zero=True,
        default=0,
        help_text="Horovod only. 0: its own.",
    )

    def validate_retry_backoff_seconds(self, seconds: int) -> int:
        """Return the wait; 0 if there is no retry."""
        return seconds if self.valid_values.get("retries") else 0

    def validate_on_hang(self, policy: OnHang) -> OnHang:
        """Require a retry for the policy `retry`."""
        if policy is OnHang.RETRY and not self.valid_values.get("retries"):
            raise ValidationError(_("Set at least one retry to retry after a hang."))
        return policy

    def validate_min_nodes(self, nodes: int) -> int:
        """Return the minimum, or 0 if it is the number of all nodes. Only frameworks in ELASTIC can run with fewer."""
        if nodes in {0, self.valid_values.get("nodes")}:
            return 0
        if self.valid_values.get("framework", Framework.PYTORCH) not in ELASTIC:
            raise ValidationError(_("TensorFlow can't run with fewer nodes. Leave “Minimum nodes” empty."))
        return nodes

    def validate_controller(self, controller: Controller) -> Controller:
        """Check that framework and image can use MPI."""
        if controller is Controller.GLOO:
            return controller
        framework, image, spec = (self.valid_values.get(name) for name in ("framework", "image", "node_spec"))
        if framework is Framework.TENSORFLOW:
            raise ValidationError(_("TensorFlow does not use MPI. Choose Gloo."))
        if framework is Framework.PYTORCH and image and image.is_builtin:
            sentence = _("PyTorch in %(image)s has no MPI support. Choose Gloo, or an image of your own with MPI.")
            raise ValidationError(sentence % {"image": image.name})
        if image and spec:
            try:
                cluster(spec.cluster).check_image(image_of(image), controller)
            except InvalidSpec as error:
                # A refusal for another reason is an error of the field `image`, which has its own check.
                if error.field == "controller" and not image.is_builtin:
                    raise ValidationError(
                        _("The cluster of this node spec can't run your own images with MPI. Choose Gloo.")
                    ) from None
                if error.field == "controller":
                    sentence = _("The image %(image)s has no MPI. Choose Gloo, or an image with mpirun.")
                    raise ValidationError(sentence % {"image": image.name}) from None
            except RuntimeFault:
                pass  # the cluster does not answer; it checks the image again when the run is submitted
        return controller

    def validate_stall_check_seconds(self, seconds: int) -> int:
        """Accept a stall check only for Horovod."""
        if seconds and self.valid_values.get("framework", Framework.HOROVOD) is not Framework.HOROVOD:
            raise ValidationError(_("The stall check works only with Horovod. Leave it empty for this framework."))
        return seconds
