"""Run a check of a cluster, and turn an exception into a failed result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from runtime.backends.base import CheckResult
from runtime.errors import RuntimeFault

UNEXPECTED_ERRORS = (OSError, LookupError, ValueError, TypeError, AttributeError)
"""What a check may raise besides RuntimeFault. All but OSError mean that an answer of the cluster has an unexpected
form."""


def run_guarded(name: str, run_check: Callable[[], CheckResult | Iterable[CheckResult]]) -> Iterator[CheckResult]:
    """Run a check and yield its results; an exception becomes a failed result of this name."""
    try:
        results = run_check()
        yield from [results] if isinstance(results, CheckResult) else results
    except RuntimeFault as fault:
        yield CheckResult(name, ok=False, detail=str(fault))
    except UNEXPECTED_ERRORS as error:
        yield failed_result(name, error)


def failed_result(name: str, error: Exception) -> CheckResult:
    """Return the result of a check that raised one of UNEXPECTED_ERRORS."""
    return CheckResult(name, ok=False, detail=f"The check failed: {type(error).__name__}: {error}")
