"""Recognize errors that are only the effect of a lost peer. Pure.

When a rank fails, its connections close, and its peers fail a moment later with an error about a closed connection.
Such an error is an *echo*. An echo becomes the run's cause only if the run has no other cause. The error of a script
whose own connection broke, for example during a download, looks like an echo too. It is still reported, because such a
run has no other cause.
"""

from __future__ import annotations

from typing import Sequence, Tuple

# Names of exception types, without their modules, that are always echoes.
_EXCEPTION_TYPES = frozenset(
    (
        "BrokenPipeError",
        "ConnectionAbortedError",
        "ConnectionResetError",
        "EOFError",
        "HorovodInternalError",
        "HostsUpdatedInterrupt",
        "UnavailableError",
    )
)
# Parts of error texts, in lower case, by the library that writes them.
_ERROR_TEXTS = (
    # Sockets, gloo, PyTorch's store
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "broken pipe",
    "socket closed",
    "socket unexpectedly closed",
    "socket timeout",
    "unexpected eof",
    "read timeout",
    "wait timeout after",
    "timed out waiting",
    "application timeout caused pair closure",
    "connectfullmesh failed",
    "monitoredbarrier",
    "sendbytes failed",
    "recvvalue failed",
    "recvvaluewithtimeout failed",
    # NCCL
    "ncclremoteerror",
    "remote process exited",
    "nccl communicator was aborted",
    "nccl communicator has been aborted",
    "watchdog caught collective operation timeout",
    # Horovod
    "horovodinternalerror",
    "horovod has been shut down",
    # TensorFlow
    "unavailableerror",
    "collective ops is aborted by",
    "failed to connect to all addresses",
    "coordination service",
    # MPI
    "mpi_err_proc_failed",
    "mpi_err_proc_aborted",
)


def is_echo(exceptions: Sequence[Tuple[str, str]]) -> bool:
    """Whether any exception of a chain is an echo.

    `exceptions` holds (name of the type, text) for the exception and for each in its chain of causes.
    """
    return any(
        type_name.rpartition(".")[2] in _EXCEPTION_TYPES or _is_echo_text(text) for type_name, text in exceptions
    )


def is_echo_in_output(lines: Sequence[str]) -> bool:
    """Whether the last output of a process contains an echo.

    This is for processes that reported no exception, for example because they aborted.
    """
    return any(_is_echo_text(line) for line in lines)


def _is_echo_text(text: str) -> bool:
    text = text.lower()
    return any(part in text for part in _ERROR_TEXTS)
