"""HTTP servers of tests."""

import threading
from contextlib import contextmanager


@contextmanager
def serving(server):
    """Run a server in a thread until the block ends, and close it. Yields the server."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
