"""The stub that mpirun starts in place of a rank or of ssh. It ends in the same way as the process that it stands for.

    mpi_stub.py SOCKET slot                       stands for a rank
    mpi_stub.py SOCKET remote HOST COMMAND...     runs a command on another node

SOCKET is the Unix socket of this node's launcher (`runtime.launcher.mpi`). Each side sends one line of JSON. For a rank
the stub sends {environment}, else {host, command}. The launcher answers {exit_code, signal} once the process has ended.

The stub imports few modules, since every rank waits for it.
"""

import json
import os
import signal
import socket
import sys

# Prefixes of the variables with which mpirun places a rank; the stub passes only these on.
_FORWARDED_PREFIXES = ("OMPI_", "OPAL_", "ORTE_", "PMIX_", "PMI_", "PRTE_")


def main(path: str, task: str, arguments: "list[str]") -> int:
    """Send the request, wait until the process has ended, and end in the same way."""
    launcher = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    launcher.connect(path)
    if task == "remote":
        request: "dict[str, object]" = {"host": arguments[0], "command": " ".join(arguments[1:])}
    else:
        forwarded = {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED_PREFIXES)}
        request = {"environment": forwarded}
    launcher.sendall(json.dumps(request).encode() + b"\n")
    response = b""
    while not response.endswith(b"\n"):
        data = launcher.recv(4096)
        if not data:
            return 1  # the launcher has ended
        response += data
    process_exit = json.loads(response)
    if process_exit["signal"]:
        # Real-time signals have no name in `signal`: the stub then ends by SIGKILL.
        signal_number = getattr(signal, process_exit["signal"], signal.SIGKILL)
        if signal_number != signal.SIGKILL:  # SIGKILL has no handler that could be set
            signal.signal(signal_number, signal.SIG_DFL)
        os.kill(os.getpid(), signal_number)
    return int(process_exit["exit_code"] or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
