"""What mpirun starts in a rank's place, and takes for ssh: asks the launcher of its node, and ends as that one says.

`mpi_stub.py SOCKET slot` stands for a rank; `mpi_stub.py SOCKET remote HOST COMMAND...` for a command on another node.
The one rule: the standard library alone, and as little of it as will do: every rank waits for it.
"""

import json
import os
import signal
import socket
import sys

TYPE_CHECKING = False  # as `typing` has it, without the time that importing it takes
if TYPE_CHECKING:
    from typing import List

_CARRIED = ("OMPI_", "OPAL_", "ORTE_", "PMIX_", "PMI_", "PRTE_")


def main(path: str, task: str, arguments: "List[str]") -> int:
    """Say what is wanted, wait for its end, and end in the same way."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.connect(path)
    if task == "remote":
        wanted: "dict[str, object]" = {"host": arguments[0], "command": " ".join(arguments[1:])}
    else:
        wanted = {"environment": {name: value for name, value in os.environ.items() if name.startswith(_CARRIED)}}
    link.sendall(json.dumps(wanted).encode() + b"\n")
    said = b""
    while not said.endswith(b"\n"):
        data = link.recv(4096)
        if not data:
            return 1
        said += data
    end = json.loads(said)
    if end["signal"]:
        number = getattr(signal, end["signal"], signal.SIGKILL)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return int(end["exit_code"] or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
