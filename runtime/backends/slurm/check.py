"""Check whether a Slurm cluster can serve runs. Each failed result says how to fix the fault; no check raises."""

from __future__ import annotations

import json
import os
import pwd
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from runtime.backends import sandbox, smoke_run
from runtime.backends.base import Backend, CheckResult
from runtime.backends.checks import run_guarded
from runtime.backends.slurm import program, submission
from runtime.backends.slurm.commands import CommandFailed, Slurm
from runtime.backends.slurm.config import SlurmConfig
from runtime.errors import BackendUnavailable, RuntimeFault
from runtime.images import recipes, venvs

_SMOKE_SECONDS = 300.0
"""How long the smoke run may take, and the job of `_check_containers`. Both run for seconds, but on a busy cluster they
may wait for minutes in Slurm's queue."""
_SMOKE_MEMORY_MIB = 256
"""Memory of each node of the smoke run. It is enough for an interpreter that imports no framework."""
_PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol", "srun")
"""Programs of Slurm that the backend runs."""
_ACCOUNTING_PROGRAMS = ("sacct", "sacctmgr")
"""Further programs for a cluster with accounting. Only these checks need sacctmgr."""


def check(
    backend: Backend, config: SlurmConfig, *, root: Path, images_root: Path, smoke: bool = True
) -> Iterator[CheckResult]:
    """Yield the results of all checks. `smoke`: if an image is built, also submit jobs; the last is a run of two nodes.

    The checks end early if Slurm's programs are missing or its controller does not answer.
    """
    programs = (*_PROGRAMS, *_ACCOUNTING_PROGRAMS) if config.accounting else _PROGRAMS
    missing_programs = [name for name in programs if shutil.which(name, path=config.bin or None) is None]
    if missing_programs:
        remedy = "Install Slurm's client programs (Debian: slurm-client), or set 'bin' to their folder."
        yield CheckResult("programs", ok=False, detail=f"Not found: {', '.join(missing_programs)}.", remedy=remedy)
        return
    slurm = Slurm(config)
    try:
        settings = slurm.settings()
    except BackendUnavailable as fault:
        remedy = "Set 'conf' to a slurm.conf that this user may read, and start munged on this machine."
        yield CheckResult("controller", ok=False, detail=str(fault), remedy=remedy)
        return
    yield CheckResult("controller", ok=True, detail=f"Slurm {settings.get('SLURM_VERSION', '')} answers.")
    yield _check_preemption(settings)
    yield from run_guarded("isolation", lambda: _check_isolation(backend))
    yield from run_guarded("accounting", lambda: _check_accounting(slurm, config, settings))
    yield from run_guarded("machines", lambda: _check_machines(backend))
    yield from run_guarded("folder of runs", lambda: _check_folder(root))
    built = [name for name in recipes.recipe_names() if venvs.is_ready(images_root, name)]
    if not built:
        yield CheckResult("images", ok=False, detail="No image is built.", remedy="manage.py build_image pytorch")
        return
    yield CheckResult("images", ok=True, detail=f"{', '.join(built)} in {images_root}")
    if smoke and config.containers:
        yield from run_guarded("containers", lambda: _check_containers(slurm, config, root))
    if smoke:
        yield from run_guarded("smoke run", lambda: _check_smoke_run(backend, built[0], root))


def _check_preemption(settings: dict[str, str]) -> CheckResult:
    preempt_mode = settings.get("PreemptMode", "OFF")
    is_suspending = "SUSPEND" in preempt_mode
    remedy = "Use CANCEL or REQUEUE: a run that is suspended for two minutes counts as lost."
    return CheckResult(
        "preemption",
        ok=not is_suspending,
        detail=f"PreemptMode is {preempt_mode}.",
        remedy=remedy if is_suspending else "",
    )


def _check_isolation(backend: Backend) -> Iterator[CheckResult]:
    for gap in backend.isolation_gaps():
        # Runs work without this isolation, so the check passes; its detail informs the administrator.
        yield CheckResult("isolation", ok=True, detail=gap, remedy="See 'Limits' in docs/operator-guide/slurm.md.")


def _check_accounting(slurm: Slurm, config: SlurmConfig, settings: dict[str, str]) -> Iterator[CheckResult]:
    if not config.accounting:
        detail = "Not used: Slurm forgets jobs some minutes after their end (MinJobAge)."
        has_slurmdbd = "slurmdbd" in settings.get("AccountingStorageType", "")
        remedy = "Slurm has accounting: set 'accounting' to true." if has_slurmdbd else ""
        yield CheckResult("accounting", ok=True, detail=detail, remedy=remedy)
        return
    try:
        slurm.call("sacct", "--noheader", "--jobs=1")  # any job will do, even one that does not exist
        permitted_accounts = slurm.permitted_accounts()
    except (CommandFailed, BackendUnavailable) as error:
        yield CheckResult(
            "accounting", ok=False, detail=str(error), remedy="Start slurmdbd, or set 'accounting' to false."
        )
        return
    yield CheckResult("accounting", ok=True, detail="sacct answers.")
    yield _check_accounts(config, settings, permitted_accounts)


def _check_accounts(config: SlurmConfig, settings: dict[str, str], permitted_accounts: set[str]) -> CheckResult:
    """Check that the console's user may submit to each account in the settings, if Slurm enforces associations."""
    used_accounts = {account for account in (config.account, *config.accounts.values()) if account}
    # Slurm ignores the case of accounts, and stores them in lower case.
    refused_accounts = sorted(account for account in used_accounts if account.lower() not in permitted_accounts)
    permitted = ", ".join(sorted(permitted_accounts)) or "none"
    # "limits" and all other values of AccountingStorageEnforce include the associations.
    if settings.get("AccountingStorageEnforce", "none") in {"none", "(null)", ""}:
        detail = f"Slurm does not enforce associations. Those of the console's user: {permitted}."
        return CheckResult("accounts", ok=True, detail=detail)
    # Without a permitted account, Slurm refuses every job, also one that names no account.
    if not refused_accounts and permitted_accounts:
        return CheckResult("accounts", ok=True, detail=f"The console's user may submit to: {permitted}.")
    user = pwd.getpwuid(os.getuid()).pw_name
    missing = ",".join(refused_accounts) or "ACCOUNT"
    return CheckResult(
        "accounts",
        ok=False,
        detail=f"Slurm refuses the console's jobs for: {', '.join(refused_accounts) or 'every account'}.",
        remedy=f"sacctmgr add user {user} account={missing}",
    )


def _check_machines(backend: Backend) -> CheckResult:
    try:
        machines = backend.capacity().machines
    except RuntimeFault as fault:
        return CheckResult("machines", ok=False, detail=str(fault), remedy="See 'scontrol show node'.")
    total_cpus = sum(machine.total.cpus for machine in machines)
    free_cpus = sum(machine.free.cpus for machine in machines)
    detail = f"{len(machines)} machines: {free_cpus:g} of {total_cpus:g} cores are free."
    remedy = "" if machines else "Correct 'node_types': no machine has the partitions and features that it names."
    return CheckResult("machines", ok=bool(machines), detail=detail, remedy=remedy)


def _check_folder(root: Path) -> CheckResult:
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=root, prefix=".check-"):
            pass
    except OSError as error:
        detail = f"{root} cannot be written: {error.strerror}"
        return CheckResult("folder of runs", ok=False, detail=detail, remedy=f"Give it to the user {os.getuid()}.")
    return CheckResult("folder of runs", ok=True, detail=f"{root}: the smoke run shows whether the machines share it.")


def _check_containers(slurm: Slurm, config: SlurmConfig, root: Path) -> CheckResult:
    """Check by a job that a compute node can import customers' own images and start the launcher in them."""
    package = program.install_node_program(root)
    result_path = root / f".check-{secrets.token_hex(8)}"
    code = (
        f"import sys; sys.path[:0] = [{str(package)!r}]; from pathlib import Path; "
        "from runtime.backends.slurm.node import check_containers; "
        f"check_containers({config.containers_bin!r}, {config.bubblewrap!r}, "
        f"{sandbox.find_bubblewrap()!r}, Path({str(result_path)!r}))"
    )
    # As for runs in own images (`program.interpreter`, `SlurmBackend._start`).
    command = [str(Path(sys.executable).resolve()), "-I", "-S", "-c", code]
    try:
        # `--time` is in minutes: as long as _SMOKE_SECONDS.
        slurm.call(
            *("sbatch", "--wait", "--parsable", "--ntasks=1", "--output=/dev/null", "--chdir=/", "--time=5"),
            *submission.placement_arguments(config.placement(""), config.account),
            stdin=f"#!/bin/sh\nexec {shlex.join(command)}\n",
            seconds=_SMOKE_SECONDS,
        )
        report = json.loads(result_path.read_bytes())
    except (CommandFailed, BackendUnavailable, OSError, ValueError) as error:
        remedy = "Submit a job by hand (sbatch), and check that compute nodes have Python at the console's path."
        return CheckResult("containers", ok=False, detail=f"The job failed: {error}", remedy=remedy)
    finally:
        result_path.unlink(missing_ok=True)
    if report["problem"]:
        remedy = (
            "Install skopeo and umoci on every compute node, or set 'containers_bin' to their folder, and start the "
            "console with a Python whose libraries lie below /usr."
        )
        detail = f"The machine {report['machine']} cannot run own images: {report['problem']}"
        return CheckResult("containers", ok=False, detail=detail, remedy=remedy)
    return CheckResult("containers", ok=True, detail=f"The machine {report['machine']} can run own images.")


def _check_smoke_run(backend: Backend, image: str, root: Path) -> CheckResult:
    try:
        # The workspace is on shared storage, since the cluster's machines do not see this machine's /tmp.
        with tempfile.TemporaryDirectory(prefix=".check-", dir=root) as workspace:
            return smoke_run.check(
                backend,
                smoke_run.new_name(),
                image,
                workspace=Path(workspace),
                memory_mib=_SMOKE_MEMORY_MIB,
                seconds=_SMOKE_SECONDS,
            )
    except (RuntimeFault, OSError) as fault:
        return CheckResult("smoke run", ok=False, detail=str(fault), remedy="See logs/slurm.log in the run's folder.")
