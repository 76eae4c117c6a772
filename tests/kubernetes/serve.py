"""The fake cluster by itself, to try the way to a real one on it.

    python -m tests.kubernetes.serve /tmp/kubeconfig

Then `KUBECONFIG=/tmp/kubeconfig make test-kubernetes`. Ends with Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

from tests.kubernetes.cluster import FakeCluster


def main() -> None:
    """Serve until a signal comes."""
    cluster = FakeCluster(Path(tempfile.mkdtemp(prefix="trainyard-fake-")), secure=True)
    cluster.make("namespaces", "", "default")
    cluster.server.kubeconfig(Path(sys.argv[1]))
    sys.stdout.write(f"{cluster.server.url}\n")
    sys.stdout.flush()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.pause()
    cluster.close()


if __name__ == "__main__":
    main()
