"""The platform's smallest script: every rank prints its number and host, and connects to rank 0 over TCP.

The script needs only Python, so if it fails, the cluster is the cause.
"""

import os
import socket
import sys
import time
from typing import Tuple

WAIT_SECONDS = 60.0
"""How long a rank waits for the others, which start at nearly the same time. A busy cluster may be slow."""


def main() -> int:
    """Connect to rank 0, or as rank 0 accept all other ranks; return 0."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    print_line("rank {} of {} on {}; rank 0 listens at {}:{}".format(rank, size, socket.gethostname(), *address))
    if rank:
        connect_to_rank_0(address, rank)
    else:
        accept_ranks(address, size)
    return 0


def accept_ranks(address: Tuple[str, int], size: int) -> None:
    """Accept a connection of each other rank, then answer all of them."""
    with socket.create_server(address) as listener:
        listener.settimeout(WAIT_SECONDS)
        connections: "dict[int, tuple[socket.socket, str]]" = {}
        while len(connections) < size - 1:
            connection, peer = listener.accept()
            connection.settimeout(WAIT_SECONDS)
            connections[int(connection.recv(32))] = (connection, peer[0])  # a rank sends its number
        for rank, (connection, peer_address) in sorted(connections.items()):
            print_line("rank {} connected from {}".format(rank, peer_address))
            connection.sendall(b"connected\n")
            connection.close()


def connect_to_rank_0(address: Tuple[str, int], rank: int) -> None:
    """Connect to rank 0, which may not listen yet, and wait for its answer."""
    give_up_at = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            connection = socket.create_connection(address, timeout=WAIT_SECONDS)
            break
        except ConnectionRefusedError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.05)  # there is no event for a peer that begins to listen
    with connection:
        connection.sendall(str(rank).encode())
        print_line("rank 0 answered: {}".format(connection.recv(32).decode().strip() or "nothing"))


def print_line(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
