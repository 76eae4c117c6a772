import os
import socket
import subprocess
import sys
from pathlib import Path

from runtime.launcher import hello


def test_ranks_connect_to_rank_0_in_any_order():
    with socket.create_server(("127.0.0.1", 0)) as result:
        port = str(result.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-I", str(Path(hello.__file__))],
            env={**common, "RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("2", "1", "0")
    ]
    reported = [process.communicate(timeout=60)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0, 0]
    assert "rank 0 answered: connected" in reported[0]
    assert "rank 1 connected from 127.0.0.1\nrank 2 connected from 127.0.0.1\n" in reported[2]
