"""What a backend may say instead of an answer. One root, a stable `code` each; leaves carry data."""

from __future__ import annotations


class RuntimeFault(Exception):
    """Root of every error of this package. `code` is stable; the text is for a person."""

    code = "runtime_error"


class InvalidSpec(RuntimeFault):
    """The run can never start as it is specified; `field` names the part of the RunSpec at fault."""

    code = "invalid_spec"

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class NoCapacity(RuntimeFault):
    """The run fits the cluster, but not now. Submitting again later is right."""

    code = "no_capacity"


class BackendUnavailable(RuntimeFault):
    """The backend did not answer. Nothing is known about the run; asking again later is right."""

    code = "backend_unavailable"


class RunNotFound(RuntimeFault):
    """The backend holds no run of this name (never submitted, deleted, or lost with its node)."""

    code = "run_not_found"
