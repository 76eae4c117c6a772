"""Trivial runs through Ray Jobs. Ray's own interpreter runs this script, which imports nothing of the platform.

python ray_jobs.py RUNS CLIENTS: starts a head node on free loopback ports, and CLIENTS threads. Each thread submits a
run and waits for its end before the next. Prints the seconds that all runs took.
"""

import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ray.job_submission import JobStatus, JobSubmissionClient

POLL_SECONDS = 0.05
"""Time between two reads of a status: short compared with a run."""
START_SECONDS = 120
"""How long the head node may take to answer."""


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_one(client: JobSubmissionClient) -> None:
    """Submit one trivial run and wait for its end. Raises SystemExit if it fails."""
    job = client.submit_job(entrypoint="python -c 'print(1)'")
    while True:
        status = client.get_job_status(job)
        if status.is_terminal():
            if status is not JobStatus.SUCCEEDED:
                raise SystemExit(f"Ray's job ended {status}: {client.get_job_info(job).message}")
            return
        time.sleep(POLL_SECONDS)  # Ray offers no event for a job's end


def run_repeatedly(client: JobSubmissionClient, runs: int) -> None:
    """Run this number of trivial runs, one after the other."""
    for _run in range(runs):
        run_one(client)


def connect(url: str, head: "subprocess.Popen[bytes]") -> JobSubmissionClient:
    """Return a client once the head node answers. Raises the error of the last try."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return JobSubmissionClient(url)
        except (ConnectionError, RuntimeError):
            if head.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)  # Ray offers no event for its readiness


def main() -> None:
    """Start Ray, run everything, print the seconds, stop Ray."""
    runs, clients = int(sys.argv[1]), int(sys.argv[2])
    dashboard_port = free_port()
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1"]
    command += [f"--port={free_port()}", f"--dashboard-port={dashboard_port}", "--dashboard-host=127.0.0.1"]
    command += [f"--ray-client-server-port={free_port()}", "--disable-usage-stats", "--num-cpus=2"]
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        head = subprocess.Popen([*command, f"--temp-dir={folder}"], stdout=subprocess.DEVNULL)
        try:
            client = connect(f"http://127.0.0.1:{dashboard_port}", head)
            run_one(client)  # the first run starts Ray's workers and does not count
            started_at = time.monotonic()
            with ThreadPoolExecutor(clients) as pool:
                for future in [pool.submit(run_repeatedly, client, runs // clients) for _client in range(clients)]:
                    future.result()  # raises the thread's error
            print(time.monotonic() - started_at)
        finally:
            head.terminate()
            head.wait()


if __name__ == "__main__":
    main()
