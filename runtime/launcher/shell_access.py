"""Access to the shells of a pod: the port on which its launcher listens, and the token that connections send first.

Only the console can compute the token, from the key that signs the run's records. Without it, anything in the pod that
connects to addresses for others, such as a web server of the run, could be misused to type into a shell.
"""

from __future__ import annotations

import hashlib
import hmac

_FIRST_PORT = 28000
"""The port of node 0's shells; the other nodes' follow it. They are below the ports that Linux gives to connections,
and not used by the frameworks."""


def port_of(node: int) -> int:
    """Return the port on 127.0.0.1 of the pod on which a node's launcher listens for shells."""
    return _FIRST_PORT + node


def token_of(record_key: str, *, run_name: str, node: int) -> str:
    """Return the token of a node's shells, as 64 hexadecimal digits. `record_key` is the key of the run's records."""
    # A signed record is a JSON object, so this text is none.
    text = "shell {} {}".format(run_name, node)
    return hmac.new(record_key.encode(), text.encode(), hashlib.sha256).hexdigest()
