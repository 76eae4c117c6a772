"""Access to the shells of a pod: the port on which its launcher listens, and the token that connections send first.

Only the console can compute the token, from the key that signs the run's records. Without a token, if the run serves a
proxy, the proxy's clients could make it connect to this port, and type into a shell.
"""

from __future__ import annotations

import hashlib
import hmac

_FIRST_PORT = 28000
"""The port of node 0's shells. The ports of the other nodes follow it. All are below the ports that Linux gives to
outgoing connections, and the frameworks do not use them."""


def port_of(node: int) -> int:
    """Return the port on 127.0.0.1 of the pod on which a node's launcher listens for shells."""
    return _FIRST_PORT + node


def token_of(record_key: str, *, run_name: str, node: int) -> str:
    """Return the token of a node's shells, as 64 hexadecimal digits. `record_key` is the key of the run's records."""
    # Everything else that is signed with this key is a JSON object (`signed_record`), so no signature equals a token.
    text = "shell {} {}".format(run_name, node)
    return hmac.new(record_key.encode(), text.encode(), hashlib.sha256).hexdigest()
