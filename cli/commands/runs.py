"""Buy a run: from a folder on this machine to its receipt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, DecimalException
from pathlib import Path
from typing import Any

import click

from .. import sync as workspace_sync
from ..client import Client
from ..errors import DETACHED, JOB_CANCELLED, JOB_FAILED, CliError, InvalidChoice, TooExpensive
from ..schemas import Job, NotebookExtensionQuote, NotebookQuote, Quote, SweepQuote
from ..screen import Screen, decimals, money
from ..session import Session, json_option, pass_session, yes_option
from ..watch import Watch
from .jobs import download, show_diagnosis, show_receipt
from .workspaces import sync_folder

MAX_AMOUNT_MINOR = 10**15
"""The least amount that is refused: ten trillion dollars are a mistake, better found before anything is sent."""
PURCHASE_OPTIONS = (
    click.argument("script", type=click.Path(path_type=Path)),
    click.argument("arguments", nargs=-1),
    click.option("--folder", type=click.Path(path_type=Path), help="The project. Default: the current folder."),
    click.option("--workspace", default="", help="Where the files are sent. Default: the project's name."),
    click.option("--no-sync", is_flag=True, help="Send nothing: run what the workspace (--workspace) has."),
    click.option("--nodes", type=int, default=1, show_default=True, help="Number of nodes."),
    click.option("--node-spec", default="", help="The node spec. Default: the first on sale."),
    click.option("--workers-per-node", type=int, help="Processes of a node. Default: one for each GPU, or one."),
    click.option("--image", default="", help="The image. Default: the framework's built-in image."),
    click.option("--framework", default="pytorch", show_default=True, help="pytorch, horovod or tensorflow."),
    click.option("--product", default="", help="The product. Default: the first on offer."),
    click.option("--epochs", type=int, default=1, show_default=True, help="The script's variable EPOCHS."),
    click.option("--lr", default="0.01", show_default=True, help="The script's variable LR."),
    click.option(
        "--batch-size",
        type=int,
        default=64,
        show_default=True,
        help="The script's variable BATCH_SIZE, for each process.",
    ),
    click.option(
        "--dataset", "datasets", multiple=True, metavar="NAME[@VERSION]", help="A dataset to mount. May be repeated."
    ),
    click.option(
        "--model", "models", multiple=True, metavar="NAME[@VERSION]", help="A model to mount. May be repeated."
    ),
    click.option(
        "--env", "environment", multiple=True, metavar="NAME=VALUE", help="An environment variable. May be repeated."
    ),
    click.option("--secret", "secrets", multiple=True, metavar="NAME", help="A secret's name. May be repeated."),
    click.option("--requirements", default="", metavar="PATH", help="A requirements file of the project."),
    click.option("--from-checkpoint", type=int, metavar="JOB", help="Start from the checkpoints of a job."),
    click.option("--max-minutes", type=click.IntRange(min=1), help="The run ends after this time."),
    click.option("--ceiling", help="The most that the run may cost, for example 5.00. The run then ends."),
    click.option("--retries", type=int, help="How often the run is tried again after a failure."),
    click.option("--name", default="", help="The job's name."),
    click.option("--tag", "tags", multiple=True, help="A tag of the job. May be repeated."),
)
"""The options of the commands `run` and `quote` that describe a run."""


@dataclass(frozen=True)
class Project:
    """A folder on this machine, the workspace for it, and the script's path in both."""

    folder: Path
    workspace: str
    code_path: str


def purchase_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that describe a run to a command, which gets their values as keyword arguments."""
    for option in reversed(PURCHASE_OPTIONS):  # decorators add the last option first
        command = option(command)
    return command


@click.command()
@purchase_options
@yes_option
@json_option
@pass_session
def quote(session: Session, /, *, yes: bool, **options: Any) -> None:
    """Price a run of SCRIPT without buying it. The project's files are sent, because the price depends on them."""
    client = session.connect()
    price_quote = _send_and_price(session, client, options, is_confirmed=yes)
    if not session.screen.print_if_json(price_quote):
        show_quote(session.screen, price_quote)


@click.command()
@purchase_options
@click.option("--watch/--detach", default=True, help="Follow the run to its end (default), or return at once.")
@click.option(
    "--get",
    "paths",
    multiple=True,
    metavar="PATH",
    help="A file or folder of the job to download at the end, for example outputs.",
)
@click.option(
    "--to", "target", type=click.Path(path_type=Path), help="The folder for --get. Default: trainyard-jobs/JOB."
)
@click.option("--max-price", help="Buy without a question up to this ceiling, and refuse above it.")
@yes_option
@json_option
@pass_session
def run(
    session: Session,
    /,
    *,
    watch: bool,
    paths: tuple[str, ...],
    target: Path | None,
    max_price: str | None,
    yes: bool,
    **options: Any,
) -> None:
    """Run SCRIPT of a project: send its files, show the price, buy, watch, and show the receipt.

    ARGUMENTS are the script's own. Put `--` before those that begin with a dash.

    Exit status: 0 succeeded, 3 failed, 4 cancelled, 5 above --max-price, 130 detached, 1 another error.
    """
    screen = session.screen
    client = session.connect()
    price_quote = _send_and_price(session, client, options, is_confirmed=yes)
    show_quote(screen, price_quote)
    confirm_purchase(session, price_quote, limit=max_price, is_confirmed=yes, noun="run", limit_option="--max-price")
    order = client.order(price_quote.id)
    screen.print(f"Bought: job {order.job}, {client.url}/jobs/{order.job}/", style="green")
    if not watch:
        screen.print_if_json({"job": client.job(order.job), "diagnosis": None, "receipt": None, "files": []})
        return
    ended_job = _watch_to_end(session, client, order.job)
    if ended_job is None:
        screen.print(f"Job {order.job} goes on. Watch it: trainyard logs -f {order.job}")
        screen.print_if_json({"job": client.job(order.job), "diagnosis": None, "receipt": None, "files": []})
        click.get_current_context().exit(DETACHED)
    style = "green" if ended_job.state == "succeeded" else "red"
    screen.print(f"Job {ended_job.id} {ended_job.state}. {ended_job.sentence}", style=style)
    diagnosis = client.diagnosis(ended_job.id) if ended_job.state == "failed" else None
    if diagnosis and not screen.is_json:
        show_diagnosis(screen, diagnosis)
    receipt = client.receipt(ended_job.id)
    if not screen.is_json:
        show_receipt(screen, receipt)
    files = _download_at_end(session, client, ended_job, paths, target) if paths else []
    screen.print_if_json({"job": ended_job, "diagnosis": diagnosis, "receipt": receipt, "files": files})
    click.get_current_context().exit({"succeeded": 0, "cancelled": JOB_CANCELLED}.get(ended_job.state, JOB_FAILED))


def _download_at_end(
    session: Session, client: Client, ended_job: Job, paths: tuple[str, ...], target: Path | None
) -> list[str]:
    """Download files of an ended job. If the job did not succeed, a failed download is only printed.

    The files may be missing then, and the exit status should be that of the job.
    """
    try:
        return download(session, client, ended_job.id, paths, target, overwrite=True)
    except CliError as error:
        if ended_job.state == "succeeded":
            raise
        session.screen.print(error.message, style="yellow")
        return []


def show_quote(screen: Screen, quote: Quote) -> None:
    """Print a quote."""
    if screen.is_json:
        return
    show_lines(screen, quote, noun="run")
    estimate = quote.estimate
    screen.print(
        f"Probably {money(estimate.p50_minor, quote.currency)}, high estimate "
        f"{money(estimate.p90_minor, quote.currency)}. {estimate.basis.sentence}"
    )
    for sentence in quote.warnings:
        screen.print(sentence, style="yellow")


def show_lines(screen: Screen, quote: Quote | SweepQuote | NotebookQuote, *, noun: str) -> None:
    """Print the lines of a quote, the ceiling that they sum to, and the minimum charge of a `noun`."""
    rows = [
        (line.title, f"{line.quantity} {line.unit.replace('_', ' ')}", money(line.amount_minor, quote.currency))
        for line in quote.lines
    ]
    rows.append(("Ceiling, never exceeded", "", money(quote.ceiling_minor, quote.currency)))
    screen.table(("Item", "Quantity", "Amount"), rows, title="Quote", right_aligned=("Quantity", "Amount"))
    if quote.minimum_minor:
        minimum = money(quote.minimum_minor, quote.currency)
        screen.print(f"A {noun} that used any time costs at least {minimum}.")


def confirm_purchase(
    session: Session,
    quote: Quote | SweepQuote | NotebookQuote,
    *,
    noun: str,
    limit: str | None,
    limit_option: str = "--max-ceiling",
    is_confirmed: bool,
) -> None:
    """Ask whether to buy a quote, unless --yes (`is_confirmed`) or a price limit was given.

    `noun` names what is bought, and `limit` is the value of the option `limit_option`. Raises TooExpensive above the
    limit, InvalidChoice without a terminal, and CliError if the console would refuse the purchase.
    """
    if quote.refusal:
        raise CliError(quote.refusal)
    if isinstance(quote, NotebookExtensionQuote):
        price_minor, advice = quote.added_minor, "Add less time"
    else:
        price_minor, advice = quote.ceiling_minor, "Lower the ceiling"
    price = money(price_minor, quote.currency)
    if limit is not None:
        limit_minor = to_minor(limit, quote.currency, limit_option)
        if price_minor > limit_minor:
            raise TooExpensive(
                f"This {noun} costs up to {price}, above your limit of {money(limit_minor, quote.currency)}. Nothing "
                f"was bought. {advice}, or raise the limit."
            )
    session.confirm(
        f"Buy this {noun} for at most {price}?",
        is_confirmed=is_confirmed or limit is not None,
        option=f"--yes or {limit_option}",
    )


def _watch_to_end(session: Session, client: Client, job_id: int) -> Job | None:
    """Follow a job to its end, and return it; None if the customer detaches from it after Ctrl-C."""
    watch = Watch(client, job_id, session.screen, pause=session.pause)
    try:
        while True:
            try:
                return watch.follow()
            except KeyboardInterrupt:
                if not session.is_interactive():
                    return None
                try:
                    answer = click.prompt(
                        "The job runs. Stop it, detach from it, or continue watching?",
                        type=click.Choice(["stop", "detach", "continue"]),
                        default="detach",
                        err=session.screen.is_json,
                    )
                except click.Abort:  # a second Ctrl-C
                    return None
                if answer == "detach":
                    return None
                if answer == "stop":
                    client.cancel(job_id)
    except CliError:
        session.screen.print(f"Job {job_id} may go on. Watch it: trainyard logs -f {job_id}")
        raise
    finally:
        watch.close()


def _send_and_price(session: Session, client: Client, options: dict[str, Any], *, is_confirmed: bool) -> Quote:
    """Send the project's files and return the price of a run. `is_confirmed` (--yes): send many without a question."""
    if options["no_sync"] and options["workspace"]:  # the script may exist only in the workspace
        project = Project(Path.cwd(), options["workspace"], options["script"].as_posix())
    else:
        project = _find_project(options["script"], options["folder"], options["workspace"])
    environment = dict(_parse_variable(text) for text in options["environment"])
    form = _build_form(client, project, options, environment)
    if not options["no_sync"]:
        sync_folder(session, client, project.folder, project.workspace, is_confirmed=is_confirmed)
    return client.quote(form)


def _find_project(script: Path, folder: Path | None, workspace: str) -> Project:
    """Return the project that a script belongs to. Raises InvalidChoice.

    Default folder: the current one if the script is in it, otherwise the script's own. Default workspace: the folder's
    name.
    """
    if folder is not None and not script.is_absolute() and not script.exists():
        script = folder / script  # `--folder project train.py`
    if not script.is_file():
        raise InvalidChoice(f"{script} does not exist, or is not a file.")
    script = script.resolve()
    if folder is None:
        folder = Path.cwd() if script.is_relative_to(Path.cwd()) else script.parent
    folder = folder.resolve()
    if not script.is_relative_to(folder):
        raise InvalidChoice(f"{script} is not in the folder {folder}. Name the project's folder with --folder.")
    name = workspace or workspace_sync.workspace_name(folder)
    return Project(folder, name, script.relative_to(folder).as_posix())


def _build_form(
    client: Client, project: Project, options: dict[str, Any], environment: dict[str, str]
) -> dict[str, Any]:
    """Return the body of the request for a quote.

    Product and node spec default to the first on offer, the image to the best one for the framework: ready images
    first, then built-in ones, then the one that has the framework's name.
    """
    product_name = options["product"] or _first_name([product.name for product in client.products()], "product")
    specs = client.node_specs()
    spec_name = options["node_spec"] or _first_name([spec.name for spec in specs], "node type")
    # None for an unknown name. The console refuses the quote then, so the form may lack what needs the node spec.
    spec = next((spec for spec in specs if spec.name == spec_name), None)
    framework = options["framework"]
    image_name = options["image"]
    if not image_name:
        images = [image for image in client.images() if framework in image.frameworks]
        images.sort(key=lambda image: (not image.ready, not image.builtin, image.name != framework))
        image_name = _first_name([image.name for image in images], f"image for {framework}")
    form = {
        "product": product_name,
        "framework": framework,
        "image": image_name,
        "workspace": project.workspace,
        "code_path": project.code_path,
        "arguments": list(options["arguments"]),
        "node_spec": spec_name,
        "nodes": options["nodes"],
        "workers_per_node": options["workers_per_node"] or (spec.gpus if spec else 0) or 1,
        "epochs": options["epochs"],
        "lr": options["lr"],
        "batch_size": options["batch_size"],
        "datasets": list(options["datasets"]),
        "models": list(options["models"]),
        "environment": environment,
        "secrets": list(options["secrets"]),
        "requirements": options["requirements"],
        "name": options["name"],
        "tags": list(options["tags"]),
    }
    if options["ceiling"] is not None and spec is not None:
        form["ceiling_minor"] = to_minor(options["ceiling"], spec.currency, "--ceiling")
    if options["max_minutes"] is not None:
        form["max_seconds"] = options["max_minutes"] * 60
    for name in ("from_checkpoint", "retries"):
        if options[name] is not None:
            form[name] = options[name]
    return form


def _first_name(names: list[str], noun: str) -> str:
    """Return the first name. Raises InvalidChoice if there is none."""
    if not names:
        raise InvalidChoice(f"The console offers no {noun}.")
    return names[0]


def _parse_variable(text: str) -> tuple[str, str]:
    """Return the name and value of a string NAME=VALUE. Raises InvalidChoice."""
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise InvalidChoice(f"Write a variable as NAME=VALUE, not {text!r}.")
    return name, value


def to_minor(text: str, currency: str, option: str) -> int:
    """Return an amount such as `5.00` in minor units. Raises InvalidChoice, which names the `option`."""
    try:
        amount = Decimal(text).scaleb(decimals(currency))
    except DecimalException:  # InvalidOperation, or Overflow
        amount = Decimal("NaN")  # which the next check refuses
    if not amount.is_finite() or amount < 0 or amount != amount.to_integral_value() or amount >= MAX_AMOUNT_MINOR:
        raise InvalidChoice(f"{option} must be an amount such as 5.00 in {currency}.")
    return int(amount)
