"""Trivial runs through Ray Jobs: run by Ray's own interpreter, beside nothing of ours. Prints the seconds it took.

python ray_jobs.py RUNS CLIENTS: a head node on free loopback ports, CLIENTS threads that submit and wait in turn.
"""

import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from ray.job_submission import JobStatus, JobSubmissionClient

POLL_SECONDS = 0.05
PATIENCE_SECONDS = 120


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_one(client: JobSubmissionClient) -> None:
    """Submit one trivial run and wait for its end; Ray offers no event for it, so it is asked."""
    job = client.submit_job(entrypoint="python -c 'print(1)'")
    while True:
        status = client.get_job_status(job)
        if status.is_terminal():
            if status is not JobStatus.SUCCEEDED:
                raise SystemExit(f"Ray's job ended {status}: {client.get_job_info(job).message}")
            return
        time.sleep(POLL_SECONDS)  # its client has nothing to wait on but the next answer


def connect(url: str, head: "subprocess.Popen[bytes]") -> JobSubmissionClient:
    """A client, as soon as the head node answers."""
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return JobSubmissionClient(url)
        except (ConnectionError, RuntimeError):
            if head.poll() is not None or time.monotonic() > give_up_at:
                raise
            time.sleep(POLL_SECONDS)  # the head's readiness comes with no event


def main() -> None:
    """Start, measure, stop."""
    runs, clients = int(sys.argv[1]), int(sys.argv[2])
    dashboard = free_port()
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1"]
    command += [f"--port={free_port()}", f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1"]
    command += [f"--ray-client-server-port={free_port()}", "--disable-usage-stats", "--num-cpus=2"]
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        head = subprocess.Popen([*command, f"--temp-dir={folder}"], stdout=subprocess.DEVNULL)
        try:
            client = connect(f"http://127.0.0.1:{dashboard}", head)
            run_one(client)
            begun = time.monotonic()
            threads = [
                threading.Thread(target=lambda: [run_one(client) for _run in range(runs // clients)])
                for _client in range(clients)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            print(time.monotonic() - begun)
        finally:
            head.terminate()
            head.wait()


if __name__ == "__main__":
    main()
