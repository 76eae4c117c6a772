"""The local backend: every node of a run is a supervised, sandboxed process tree on this machine.

It hides folders, locks, ports and processes. Its one rule: the disk is the truth. Any number of these objects, in any
number of processes, may work on one root at the same time and die at any moment; none holds state of its own.
"""

from __future__ import annotations

import codecs
import compileall
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.backends import admission, cgroups, machine, orders, recipes, sandbox, warmstart
from runtime.backends.bells import Bells
from runtime.backends.keeper import Keeper, network_gap
from runtime.backends.runs import TRASH, FolderLock, Run
from runtime.backends.trash import Trash
from runtime.errors import BackendUnavailable, InvalidSpec, NoCapacity, RunNotFound
from runtime.launcher import calls
from runtime.launcher.frameworks import rank_environment
from runtime.launcher.topology import Plan
from runtime.specs import (
    Capacity,
    Controller,
    Image,
    LogChunk,
    NodeCapacity,
    Resources,
    RunPhase,
    RunSpec,
    RunStatus,
)

_LONGEST_SAMPLE = 1 << 20
_HEARTBEAT_SECONDS = 0.5
_SOURCE_ROOT = Path(__file__).resolve().parents[2]
_LAUNCHER = _SOURCE_ROOT / "runtime" / "launcher"


class LocalBackend:
    """Runs on this machine. `root` holds the runs; `images_root` the built-in images (`runtime.backends.images`).

    What the machine offers is measured unless given: `cpus`, and `memory_mib` (else `memory_fraction` of its memory).
    `disk_mib` is what a run whose spec does not say may add to its folders. `network`: `private` gives each run one of
    its own where the kernel allows, `host` shares the machine's. `cgroups`: use them where the kernel allows.
    `warm_seconds`: how long interpreters are kept ready after the last submission; 0: every start is a cold one.
    """

    submits_at_once = 1

    def __init__(
        self,
        *,
        root: Path,
        images_root: Path,
        cpus: float | None = None,
        memory_mib: int | None = None,
        memory_fraction: float = 0.9,
        disk_mib: int = 51200,
        network: str = "private",
        cgroups: bool = True,
        warm_seconds: float = 0,
    ) -> None:
        self._root = root.resolve()
        self._images_root = images_root.resolve()
        self._disk_mib = disk_mib
        self._network = network
        self._cgroups = cgroups
        self._warm_seconds = warm_seconds
        self._gpus = machine.gpus()
        self._total = Resources(
            cpus=machine.cpus() if cpus is None else cpus,
            memory_mib=int(machine.memory_mib() * memory_fraction) if memory_mib is None else memory_mib,
            gpus=len(self._gpus),
            gpu_type=self._gpus[0].model if self._gpus else "",
        )
        self._disk = machine.Disk(self._root, self._disk_mib)
        self._trash = Trash(self._root / TRASH)
        self._keeper = Keeper(self._root, idle_seconds=warm_seconds)
        # A sandbox cannot keep what it compiles; an image with our own Python then need not compile the launcher.
        compileall.compile_dir(_LAUNCHER, quiet=2)
        for folder in (self._root, *(self._root / part for part in (".active", ".changes", ".checkpoints"))):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    # The protocol

    def submit(self, spec: RunSpec) -> None:
        """See `Backend.submit`. Built-in images only."""
        admission.check_name(spec.name)
        run = self._run(spec.name)
        if run.exists():
            return
        spec = admission.check(spec, self._images_root)
        bubblewrap = sandbox.find_bubblewrap()
        # Looked at before anybody waits for us: how much there is to read is up to the customer.
        plain = not _may_import_more(spec)
        thrown_away = False
        try:
            with FolderLock(self._root / ".lock"):
                if run.exists():
                    return
                thrown_away = run.destroy()
                gpus = self._reserve(spec)
                try:
                    self._launch(run, spec, gpus, bubblewrap, plain=plain)
                except BaseException as error:
                    thrown_away = run.destroy()
                    if isinstance(error, OSError):
                        raise BackendUnavailable(f"The run could not be started on this machine: {error}.") from error
                    raise
        finally:
            if thrown_away:
                self._trash.empty()

    def describe(self, name: str) -> RunStatus:
        """See `Backend.describe`."""
        return self._run(name).status()

    def logs(self, name: str, rank: int, offset: int = 0, limit: int = 65536) -> LogChunk:
        """See `Backend.logs`. A rank that the run does not have raises RunNotFound."""
        run = self._run(name)
        # Asked first: what is written after this look is there at the next one.
        ended = run.status().phase is RunPhase.ENDED
        if not 0 <= rank < run.spec().world_size:
            raise RunNotFound(f"The run '{name}' has no rank {rank}.")
        data, at_end = _read(run.folder / "logs" / f"rank-{rank}.log", offset, limit)
        final = ended and at_end
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data, final=final)
        # What the decoder holds back is the start of a character: it is read again, with its end.
        held_back = len(decoder.getstate()[0])
        return LogChunk(text, max(0, offset) + len(data) - held_back, eof=final)

    def samples(self, name: str, node: int, offset: int = 0, limit: int = 65536) -> LogChunk:
        """See `Backend.samples`. A node that the run does not have raises RunNotFound."""
        run = self._run(name)
        ended = run.status().phase is RunPhase.ENDED
        if not 0 <= node < run.spec().nodes:
            raise RunNotFound(f"The run '{name}' has no node {node}.")
        path = run.folder / "nodes" / f"{node}.samples.jsonl"
        data, at_end = _read(path, offset, limit)
        if b"\n" not in data and not at_end:
            data, at_end = _read(path, offset, _LONGEST_SAMPLE)
        data = data[: data.rfind(b"\n") + 1]
        return LogChunk(data.decode("utf-8", "replace"), max(0, offset) + len(data), eof=ended and at_end)

    def stacks(self, name: str) -> dict[int, str]:
        """See `Backend.stacks`."""
        run = self._run(name)
        run.submission()
        found = {}
        for path in (run.folder / "logs").glob("stacks-*.txt"):
            found[int(path.stem.partition("-")[2])] = path.read_text("utf-8", "replace")
        return dict(sorted(found.items()))

    def stop(self, name: str, grace_seconds: int) -> None:
        """See `Backend.stop`."""
        run = self._run(name)
        with contextlib.suppress(RunNotFound):
            if run.status().phase is not RunPhase.ENDED:
                run.request_stop(grace_seconds)

    def delete(self, name: str) -> None:
        """See `Backend.delete`. Nobody who submits waits for what takes long: ending it, and removing what it wrote."""
        run = self._run(name)
        run.end()
        with FolderLock(self._root / ".lock"):
            run.destroy()
        self._trash.empty()

    def delete_checkpoints(self, key: str) -> None:
        """See `Backend.delete_checkpoints`."""
        self._trash.take(self._checkpoints(key))
        self._trash.empty()

    def names(self, *, live: bool = False) -> list[str]:
        """See `Backend.names`. Half-made submissions are among them."""
        if live:
            return sorted(path.name for path in (self._root / ".active").iterdir())
        return sorted(path.name for path in self._root.iterdir() if path.is_dir() and not path.name.startswith("."))

    def capacity(self) -> Capacity:
        """See `Backend.capacity`: one machine."""
        free, _gpus = self._free()
        return Capacity((NodeCapacity(socket.gethostname(), self._total, free),))

    def changes(self, stop_after: float | None = None) -> Iterator[set[str]]:
        """See `Backend.changes`. Only our own flat folder is watched, never one that code inside a run can fill."""
        end = None if stop_after is None else time.monotonic() + stop_after
        with contextlib.closing(Bells(self._root / ".changes")) as bells:
            while end is None or time.monotonic() < end:
                yield bells.hear(_HEARTBEAT_SECONDS)

    def check_image(self, image: Image, controller: Controller = Controller.GLOO) -> None:
        """See `Backend`."""
        admission.check_image(image, self._images_root, controller)

    def environment(self, spec: RunSpec, rank: int) -> dict[str, str]:
        """See `Backend`."""
        ports = {"master_port": 0, "worker_ports": [0] * orders.ports_needed(spec)["worker_ports"]}
        told = Plan.from_data({**orders.plan(spec), **ports, "node": rank // spec.workers_per_node})
        return rank_environment(told, rank % spec.workers_per_node)

    def run_folder(self, name: str) -> Path:
        """See `Backend.run_folder`; the layout is in `runtime.backends.runs`."""
        return self._run(name).folder

    def prepare(self, image: Image) -> None:
        """Get ready for runs of this image, in the background; nothing where warm starts are not wanted."""
        wish = self._zygote(image)
        if wish is not None:
            self._keeper.prepare(wish)

    def is_prepared(self, image: Image) -> bool:
        """Whether the next run of this image would start warm."""
        wish = self._zygote(image)
        return wish is not None and (self._root / warmstart.FOLDER / wish["name"]).exists()

    def isolation_gaps(self) -> list[str]:
        """See `Backend.isolation_gaps`."""
        gaps = []
        why_shared = network_gap() if self._network == "private" else "The settings ask for that."
        if why_shared:
            gaps.append(f"Runs share this machine's network and can reach what listens on its loopback. {why_shared}")
        why_measured = cgroups.why_not() if self._cgroups else "The settings ask for that."
        if why_measured:
            gaps.append(
                "Memory and processes of runs are measured four times a second instead of held by the kernel, and "
                f"their CPU time is not limited. {why_measured}"
            )
        elif why_no_cpu := cgroups.why_no_cpu():
            gaps.append(f"The CPU time of runs is not limited. {why_no_cpu}")
        if why_all := calls.why_not():
            gaps.append(f"Runs may make every call of the kernel, also those that reach other runs. {why_all}")
        return gaps

    def retire(self) -> None:
        """See `Backend.retire`."""
        self._keeper.retire()

    # Room

    def _free(self) -> tuple[Resources, list[int]]:
        """What no live run holds, and which GPUs that is; nothing where the disk is full.

        A submission under way holds what it asks for.
        """
        if self._disk.is_full():
            return Resources(0, 0), []
        cpus, memory = self._total.cpus, self._total.memory_mib
        gpus = {gpu.index for gpu in self._gpus}
        for path in (self._root / ".active").iterdir():
            run = self._run(path.name)
            try:
                if run.status().phase is RunPhase.ENDED:
                    continue
                submission = run.submission()
            except RunNotFound:
                continue
            resources, nodes = submission["spec"]["resources"], submission["spec"]["nodes"]
            cpus -= resources["cpus"] * nodes
            memory -= resources["memory_mib"] * nodes
            gpus.difference_update(*submission["gpus"])
        free = Resources(max(0.0, round(cpus, 6)), max(0, memory), len(gpus), self._total.gpu_type if gpus else "")
        return free, sorted(gpus)

    def _reserve(self, spec: RunSpec) -> list[list[int]]:
        """The GPUs of each node; the caller holds the root's lock. Raises InvalidSpec, NoCapacity."""
        free, gpus = self._free()
        capacity = Capacity((NodeCapacity(socket.gethostname(), self._total, free),))
        if (room := capacity.nodes_ever(spec.resources)) < spec.nodes:
            raise InvalidSpec(
                f"{spec.nodes} nodes of this kind can never run here: the cluster has room for {room}.", field="nodes"
            )
        if (room := capacity.nodes_now(spec.resources)) < spec.nodes:
            raise NoCapacity(f"{spec.nodes} nodes are needed, and {room} of this kind are free now.")
        each = spec.resources.gpus
        return [gpus[node * each : (node + 1) * each] for node in range(spec.nodes)]

    # Starting

    def _launch(self, run: Run, spec: RunSpec, gpus: list[list[int]], bubblewrap: str, *, plain: bool) -> None:
        run.prepare()
        checkpoints = self._checkpoints(spec.checkpoint_key) if spec.checkpoint_key else run.folder / "checkpoints"
        checkpoints.mkdir(exist_ok=True, mode=0o700)
        nonce = secrets.token_hex(16)
        token = secrets.token_hex(32)
        wish = self._zygote(spec.image) if spec.controller is not Controller.MPI else None
        zygote = str(self._root / warmstart.FOLDER / wish["name"]) if wish else ""
        if zygote and plain:
            zygote += warmstart.PLAIN
        with contextlib.ExitStack() as stack:
            locks: list[int] = []
            told: list[dict[str, Any]] = []
            for node in range(spec.nodes):
                place = self._place(run, spec, node, gpus[node], checkpoints)
                locks.append(run.hold_lock(node))
                stack.callback(os.close, locks[-1])
                environment = self._environment(place)
                told.append(
                    {
                        **orders.for_node(spec, node, place, environment, disk_mib=self._disk_mib),
                        "folder": str(run.folder),
                        "bell": str(run.bell),
                        "sandbox": [bubblewrap, *sandbox.arguments(place, environment)],
                        "cgroups": self._cgroups,
                        "zygote": zygote,
                    }
                )
                told[-1]["launcher"]["token"] = token
            order = {
                "folder": str(run.folder),
                "nonce": nonce,
                "network": self._network,
                **orders.ports_needed(spec),
                "locks": locks,
                "nodes": told,
                "wish": wish,
            }
            with self._keeper.started(order, run.folder / "logs" / "supervisor-0.log") as nonce:
                run.record(spec, nonce=nonce, gpus=gpus)

    def _zygote(self, image: Image) -> dict[str, Any] | None:
        """The zygote of an image as it is now, as the nursery is told of it; None where nothing is kept ready."""
        if not self._warm_seconds:
            return None
        folder = self._images_root / image.builtin
        return {
            "name": self._keeper.zygote_name(image.builtin, (folder / "ready.json").stat().st_mtime_ns),
            "python": str(folder / "bin" / "python"),
            "modules": recipes.preloads(image.builtin),
            # No GPU is to be touched before a rank is told which are its own.
            "environment": sandbox.base_environment(folder, []),
        }

    def _place(self, run: Run, spec: RunSpec, node: int, gpus: list[int], checkpoints: Path) -> sandbox.Place:
        hostname = f"{spec.name}-{node}"
        etc = run.folder / "etc" / str(node)
        sandbox.write_etc(etc, hostname)
        image = self._images_root / spec.image.builtin
        return sandbox.Place(
            hostname=hostname,
            run_folder=run.folder / "run",
            checkpoint_folder=checkpoints,
            etc_folder=etc,
            image=image,
            interpreter_prefixes=sandbox.prefixes(image),
            launcher=_LAUNCHER,
            mounts=spec.mounts,
            datasets_target=spec.datasets_target,
            memory_bytes=spec.resources.memory_mib << 20,
            gpus=tuple(gpus),
        )

    def _environment(self, place: sandbox.Place) -> dict[str, str]:
        return sandbox.base_environment(place.image, [gpu.uuid for gpu in self._gpus if gpu.index in place.gpus])

    def _run(self, name: str) -> Run:
        if name.startswith(".") or "/" in name or not name:
            raise RunNotFound(f"There is no run named '{name}'.")
        return Run(self._root, name)

    def _checkpoints(self, key: str) -> Path:
        return self._root / ".checkpoints" / key


def _may_import_more(spec: RunSpec) -> bool:
    """Whether ranks that have the image's frameworks loaded are of use to the run's script."""
    sources = [mount.source for mount in spec.mounts if mount.target == spec.workspace_target]
    return bool(spec.builtin_script) or not sources or warmstart.is_of_use(Path(sources[0]), spec.script)


def _read(path: Path, offset: int, limit: int) -> tuple[bytes, bool]:
    """Up to `limit` bytes from an offset, and whether that was all; nothing where there is no such file yet."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, offset))
            return file.read(limit), not file.read(1)
    except FileNotFoundError:
        return b"", True
