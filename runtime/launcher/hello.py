"""The platform's smallest script: every rank says who it is, and rank 0 hears of all the others over TCP.

The one rule: it needs nothing but Python, so that what it finds wrong is the cluster's.
"""

import os
import socket
import sys
import time
from typing import Tuple

PATIENCE_SECONDS = 60.0


def main() -> int:
    """Meet the other ranks; 0 when all were there."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    say("rank {} of {} on {}, meeting at {}:{}".format(rank, size, socket.gethostname(), *address))
    if rank:
        greet(address, rank)
    else:
        gather(address, size)
    return 0


def gather(address: Tuple[str, int], size: int) -> None:
    """Hear every other rank once, then let them all go."""
    with socket.create_server(address) as listener:
        listener.settimeout(PATIENCE_SECONDS)
        heard: "dict[int, tuple[socket.socket, str]]" = {}
        while len(heard) < size - 1:
            connection, peer = listener.accept()
            connection.settimeout(PATIENCE_SECONDS)
            heard[int(connection.recv(32))] = (connection, peer[0])
        for rank, (connection, peer_address) in sorted(heard.items()):
            say("rank {} came from {}".format(rank, peer_address))
            connection.sendall(b"well met\n")
            connection.close()


def greet(address: Tuple[str, int], rank: int) -> None:
    """Come to rank 0, which may not listen yet, and wait for its word."""
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            connection = socket.create_connection(address, timeout=PATIENCE_SECONDS)
            break
        except ConnectionRefusedError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.05)  # that a peer listens comes with no event
    with connection:
        connection.sendall(str(rank).encode())
        say("rank 0 says: {}".format(connection.recv(32).decode().strip() or "nothing"))


def say(line: str) -> None:
    """A line for who reads the output, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
