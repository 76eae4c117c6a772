import os
import socket
import subprocess
import sys
from pathlib import Path

from runtime.launcher import hello


def test_every_rank_meets_rank_0_in_whatever_order_they_come() -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = str(found.getsockname()[1])
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
    told = [process.communicate(timeout=60)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0, 0]
    assert "rank 0 says: well met" in told[0]
    assert "rank 1 came from 127.0.0.1\nrank 2 came from 127.0.0.1\n" in told[2]
