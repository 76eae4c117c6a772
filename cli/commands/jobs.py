"""List, show and stop jobs; print and download their output, curves, files and receipts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import click

from ..client import Client
from ..downloads import download_file, is_same, job_files, safe_parts, set_modified_time, target_of
from ..errors import CliError, InvalidChoice
from ..schemas import Diagnosis, Receipt
from ..screen import Screen, clean_output, count, money, size
from ..session import Session, json_option, pass_session
from ..watch import Line, add_part, lines

job_argument = click.argument("job_id", metavar="JOB", type=click.IntRange(min=1))


@click.command()
@click.option("--state", default="", help="Only jobs in this state, for example running or failed.")
@click.option("--tag", default="", help="Only jobs with this tag.")
@click.option("--name", default="", help="Only jobs with this text in their name.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Jobs to list.")
@json_option
@pass_session
def jobs(session: Session, state: str, tag: str, name: str, limit: int) -> None:
    """List the jobs, newest first."""
    results = list(islice(session.connect().jobs(state=state, tag=tag, name=name), limit))
    if not session.screen.print_if_json(results):
        session.screen.table(
            ("Job", "Name", "State", "Progress", "Cost", "Queued"),
            (
                (f"{job.id}", job.name, job.state, f"{job.progress.fraction:.0%}",
                 money(job.cost_minor, job.currency), job.queued_at)
                for job in results
            ),
            right_aligned=("Job", "Progress", "Cost"),
        )  # fmt: skip


@click.command()
@job_argument
@json_option
@pass_session
def status(session: Session, job_id: int) -> None:
    """Show a job: its state and the reason, progress, cost, and the diagnosis if it failed."""
    client = session.connect()
    job = client.job(job_id)
    diagnosis = client.diagnosis(job_id) if job.state == "failed" else None
    if session.screen.print_if_json(asdict(job) | {"diagnosis": diagnosis}):
        return
    progress = job.progress
    rows = [
        ("Job", f"{job.id} {job.name}"),
        # `sentence` says in words why the job ended.
        ("State", " ".join(filter(None, (job.state, job.sentence or job.waiting_for)))),
        ("Progress", f"{progress.fraction:.0%}, epoch {progress.epoch} of {progress.epochs}"),
        (
            "Cost",
            f"{money(job.cost_minor, job.currency)}, at most {money(job.ceiling_minor, job.currency)}",
        ),
        ("Run", f"{job.code_path} in {job.workspace}, {job.nodes} x {job.node_spec}, {job.image}"),
    ]
    session.screen.table(("", ""), rows)
    if diagnosis:
        show_diagnosis(session.screen, diagnosis)


@click.command()
@job_argument
@click.option("--follow", "-f", is_flag=True, help="Print new output as it is written, until the job ends.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="The process, by its rank.")
@click.option("--attempt", type=click.IntRange(min=1), help="The attempt of the job. Default: the latest.")
@click.option("--timestamps", is_flag=True, help="Begin each line with the time when it was written.")
@json_option
@pass_session
def logs(session: Session, job_id: int, follow: bool, rank: int, attempt: int | None, *, timestamps: bool) -> None:
    """Print the output of one process of a job."""
    if follow and session.screen.is_json:
        raise InvalidChoice("--follow prints lines as they are written; leave out --json.")
    client = session.connect()
    if follow:
        client.log(job_id, rank=rank, attempt=attempt)  # an unknown job or rank is an error, not an empty output
        for line in lines(client, job_id, rank=rank, attempt=attempt, timestamps=timestamps, pause=session.pause):
            click.echo(_format_line(line))
        return
    texts, times = list[str](), list[float | None]()
    incomplete, offset, is_last = Line(""), 0, False
    while not is_last:
        part = client.log(job_id, rank=rank, attempt=attempt, offset=offset, timestamps=timestamps)
        is_last = part.eof or part.next_offset <= offset  # without --follow, nothing new means the end
        offset = part.next_offset
        *complete, incomplete = add_part(incomplete, part)
        if is_last and incomplete.text:
            complete.append(incomplete)
        if session.screen.is_json:
            texts.append(part.text)
            times += [line.time for line in complete]
        else:
            for line in complete:
                click.echo(_format_line(line))
    document: dict[str, object] = {"job": job_id, "rank": rank, "text": "".join(texts)}
    if timestamps:
        document["times"] = times
    session.screen.print_if_json(document)


def _format_line(line: Line) -> str:
    """Return a line of output for the terminal. If its time is known, the line begins with it, as local time."""
    text = clean_output(line.text)
    if line.time is None:
        return text
    return f"{datetime.fromtimestamp(line.time, UTC).astimezone().isoformat(timespec='milliseconds')} {text}"


@click.command()
@job_argument
@json_option
@pass_session
def metrics(session: Session, job_id: int) -> None:
    """Show the curves of a job: number of points, first, last, lowest and highest value. With --json all points."""
    curves = session.connect().metrics(job_id)
    if session.screen.print_if_json(curves):
        return
    rows = []
    for name, points in sorted(curves.items()):
        # Each point is a step and a value. `decode` does not check lengths, so an invalid point is skipped here.
        values = [point[1] for point in points if len(point) == 2]
        if values:
            numbers = (values[0], values[-1], min(values), max(values))
            rows.append((name, f"{len(values):,}", *(f"{number:.6g}" for number in numbers)))
    session.screen.table(
        ("Curve", "Points", "First", "Last", "Lowest", "Highest"),
        rows,
        right_aligned=("Points", "First", "Last", "Lowest", "Highest"),
    )


@click.command()
@job_argument
@json_option
@pass_session
def stop(session: Session, job_id: int) -> None:
    """Stop a job. A running job gets SIGTERM and time to save. You pay for the time it used."""
    job = session.connect().cancel(job_id)
    if not session.screen.print_if_json(job):
        session.screen.print(f"Job {job_id}: {job.state}.")


@click.command()
@click.argument("job_id", metavar="[JOB]", type=click.IntRange(min=1), required=False)
@json_option
@pass_session
def receipts(session: Session, job_id: int | None) -> None:
    """List the last 100 receipts, or show the receipt of JOB."""
    client = session.connect()
    if job_id is not None:
        receipt = client.receipt(job_id)
        if not session.screen.print_if_json(receipt):
            show_receipt(session.screen, receipt)
        return
    results = client.receipts()
    if not session.screen.print_if_json(results):
        session.screen.table(
            ("Receipt", "Title", "Charged", "Ceiling", "Date"),
            (
                (f"{receipt.id}", receipt.title, money(receipt.total_minor, receipt.currency),
                 money(receipt.ceiling_minor, receipt.currency), receipt.created_at)
                for receipt in results
            ),
            right_aligned=("Receipt", "Charged", "Ceiling"),
        )  # fmt: skip


def show_diagnosis(screen: Screen, diagnosis: Diagnosis) -> None:
    """Print why a job failed, the line of code, and what to do."""
    rank = f" (rank {diagnosis.rank})" if diagnosis.rank is not None else ""
    screen.print(f"{diagnosis.title}{rank}", style="bold")
    if diagnosis.exception:
        screen.print(f"  {diagnosis.exception}")
    if diagnosis.file:
        line = f", line {diagnosis.line}" if diagnosis.line is not None else ""
        screen.print(f"  {diagnosis.file}{line}: {diagnosis.code.strip()}")
    screen.print(f"  {diagnosis.advice}")


def show_receipt(screen: Screen, receipt: Receipt) -> None:
    """Print a receipt."""
    rows = [
        (line.title, f"{line.quantity} {line.unit.replace('_', ' ')}", money(line.amount_minor, receipt.currency))
        for line in receipt.lines
    ]
    total = money(receipt.total_minor, receipt.currency)
    rows.append(("Charged", f"at most {money(receipt.ceiling_minor, receipt.currency)}", total))
    screen.table(
        ("Item", "Quantity", "Amount"), rows, title=f"Receipt: {receipt.title}", right_aligned=("Quantity", "Amount")
    )


@click.group()
def files() -> None:
    """List and download the files of a job."""


@files.command("list")
@job_argument
@click.argument("path", default="")
@json_option
@pass_session
def list_files(session: Session, job_id: int, path: str) -> None:
    """List a folder of a job: outputs, checkpoints, logs, or a folder below them."""
    entries = list(session.connect().job_files(job_id, path.strip("/")))
    if not session.screen.print_if_json(entries):
        rows = [
            (entry.path + ("/" if entry.kind == "folder" else ""), "" if entry.kind == "folder" else size(entry.size))
            for entry in entries
        ]
        session.screen.table(("Path", "Size"), rows, right_aligned=("Size",))


@files.command()
@job_argument
@click.argument("path", default="outputs")
@click.option(
    "--to", "folder", type=click.Path(path_type=Path), help="The folder to save to. Default: trainyard-jobs/JOB."
)
@click.option("--overwrite", is_flag=True, help="Replace files in this folder that differ from the job's.")
@json_option
@pass_session
def get(session: Session, job_id: int, path: str, folder: Path | None, overwrite: bool) -> None:
    """Download PATH, a file or folder of a job (default: outputs). Skips files that you already have."""
    client = session.connect()
    saved_paths = download(session, client, job_id, [path], folder, overwrite=overwrite)
    session.screen.print_if_json({"job": job_id, "files": saved_paths})


def download(
    session: Session, client: Client, job_id: int, paths: Iterable[str], folder: Path | None, *, overwrite: bool
) -> list[str]:
    """Download files and folders of a job; return the paths on this machine. Raises CliError."""
    folder = folder or Path("trainyard-jobs") / str(job_id)
    clean_paths = [path.strip("/") for path in paths]
    for path in clean_paths:
        if path:
            safe_parts(path)  # raises for an unsafe path, before anything is downloaded
    entries = [entry for path in clean_paths for entry in job_files(client, job_id, path)]
    if not entries:
        places = ", ".join(path for path in clean_paths if path)
        raise CliError(f"Job {job_id} has no files at {places}." if places else f"Job {job_id} has no files.")
    saved_paths, received = [], 0
    with session.screen.transfer(f"Job {job_id}", sum(entry.size for entry in entries)) as advance:
        for entry in entries:
            target = target_of(folder, entry.path)
            saved_paths.append(str(target))
            if target.exists():
                if is_same(target, entry):
                    advance(entry.size)
                    continue
                if not overwrite:
                    raise InvalidChoice(f"{target} exists, and is not the job's file. Add --overwrite to replace it.")
            received += download_file(client, job_id, entry, target, on_received=advance, pause=session.pause)
            set_modified_time(target, entry)
    session.screen.print(f"{count(len(entries), 'file')} in {folder}, {size(received)} received.", style="green")
    return saved_paths
