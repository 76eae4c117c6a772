"""Starting what a submission needs: by the nursery, which has it ready, or cold; and keeping the nursery.

The one rule: an order is taken by one of the two. One that the nursery did not take for certain is started cold under
another nonce, so that whoever wakes up late finds that it was never submitted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.backends import identity, nursery, warmstart
from runtime.backends.runs import wait_gone
from runtime.errors import RuntimeFault

_SOURCE_ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = _SOURCE_ROOT / "runtime"
_CALL = f"import sys; sys.path.insert(0, {str(_SOURCE_ROOT)!r}); from runtime.backends.{{}} import main; main()"
_END_SECONDS = 10.0


class Keeper:
    """Starts submissions under one root. `idle_seconds`: how long the nursery stays without any; 0: there is none."""

    def __init__(self, root: Path, *, idle_seconds: float) -> None:
        self._root = root
        self._folder = root / warmstart.FOLDER
        self._idle_seconds = idle_seconds
        self._version = _version()

    @contextlib.contextmanager
    def started(self, order: dict[str, Any], log: Path) -> Iterator[str]:
        """Have it started once the block is left, if it is on record by then under the nonce that is given."""
        if self._idle_seconds and self._is_there():
            with warmstart.handed_over(self._root, order, order["locks"]) as taken:
                if taken:
                    yield order["nonce"]
                    return
        order["nonce"] = secrets.token_hex(16)
        with self._cold(order, log):
            yield order["nonce"]
        if self._idle_seconds:
            self.prepare(order["wish"])

    def prepare(self, wish: dict[str, Any] | None) -> None:
        """Have a nursery, and in it a zygote of this kind where one is wished for; both get ready by themselves."""
        if self._is_there():
            with warmstart.handed_over(self._root, {"wish": wish, "nodes": []}, []):
                return
        settings = {
            "root": str(self._root),
            "version": self._version,
            "idle_seconds": self._idle_seconds,
            "wish": wish,
        }
        process = self._python("nursery", json.dumps(settings), None)
        # It detaches as soon as it runs.
        threading.Thread(target=process.wait, daemon=True).start()

    def zygote_name(self, image: str, built_at: int) -> str:
        """What its socket is called: another build of the image, or of this code, has another zygote."""
        return hashlib.sha256(f"{self._version}-{image}-{built_at}".encode()).hexdigest()[:16]

    def retire(self) -> None:
        """End the nursery and what it keeps ready. Runs go on."""
        known = self._known()
        if known is not None and identity.send(known["pid"], known["start_time"], signal.SIGTERM):
            wait_gone(known["pid"], known["start_time"], _END_SECONDS)

    def _is_there(self) -> bool:
        """Whether there is a nursery of this very code; one of another is sent away."""
        known = self._known()
        if known is None:
            return False
        if known["version"] != self._version:
            identity.send(known["pid"], known["start_time"], signal.SIGTERM)
            return False
        return identity.is_alive(known["pid"], known["start_time"])

    def _known(self) -> dict[str, Any] | None:
        try:
            known: dict[str, Any] = json.loads((self._folder / nursery.SETTINGS).read_bytes())
        except (OSError, ValueError):
            return None
        return known

    @contextlib.contextmanager
    def _cold(self, order: dict[str, Any], log: Path) -> Iterator[None]:
        process = self._python("starter", json.dumps(order), log, order["locks"], shut=False)
        try:
            yield
        finally:
            # The end of its stdin is what the starter waits for; it has detached by then.
            if process.stdin is not None:
                process.stdin.close()
            process.wait()

    def _python(
        self, module: str, told: str, log: Path | None, kept: list[int] | None = None, *, shut: bool = True
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") if log is not None else contextlib.nullcontext(subprocess.DEVNULL) as output:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CALL.format(module)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd="/",
                env={"LANG": "C.UTF-8"},
                pass_fds=kept or [],
                start_new_session=True,
            )
        if process.stdin is None:
            raise RuntimeFault("a process was started without a stdin")
        process.stdin.write(told.encode())
        process.stdin.close() if shut else process.stdin.flush()
        return process


def network_gap() -> str:
    """Why runs on this machine can't have a network of their own; "" where they can."""
    command = [sys.executable, "-I", "-S", "-c", _CALL.format("network")]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() if not answer.returncode else "The kernel could not be asked."


def _version() -> str:
    """What tells this code and interpreter from another's: a nursery goes on with what it has loaded."""
    digest = hashlib.sha256(sys.executable.encode())
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(f"{path}{path.stat().st_mtime_ns}".encode())
    return digest.hexdigest()
