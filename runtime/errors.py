"""The errors of backends and images, each with a stable `code`."""

from __future__ import annotations


class RuntimeFault(Exception):
    """The base class of this package's errors. Programs use `code`; the text is for people."""

    code = "runtime_error"


class InvalidSpec(RuntimeFault):
    """The run can never start with this RunSpec. `field` names the field at fault."""

    code = "invalid_spec"

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class NoCapacity(RuntimeFault):
    """The run fits the cluster, but not now. The caller may retry later."""

    code = "no_capacity"


class BackendUnavailable(RuntimeFault):
    """The backend did not answer, so nothing is known about the run. The caller may retry later."""

    code = "backend_unavailable"


class RunUnreadable(BackendUnavailable):
    """The backend answers, but cannot read the files of this run, such as for an error of the storage.

    Nothing is known about the run. Other runs may be readable.
    """

    code = "run_unreadable"


class RunNotFound(RuntimeFault):
    """The backend holds no run of this name (never submitted, deleted, or lost with its node)."""

    code = "run_not_found"
