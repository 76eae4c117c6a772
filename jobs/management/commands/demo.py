"""Serve the console, buy a training run through its API, and show the results and the receipt."""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser
from rich.console import Console

from console.accounts.models import Membership, User
from console.accounts.services import create_organization, create_token, revoke_token
from jobs.demo import Customer, DemoFailed

READY_SECONDS = 120
"""How long the console may take to start: a first start creates the database."""
LABEL = "demo"
"""Name of the API token that the demo creates, and replaces when it runs again."""
INTERRUPTED = 130
"""The exit status after Ctrl-C before the demo's end, as shells report it: 128 and the number of SIGINT."""
EXAMPLES: Path = settings.BASE_DIR / "examples"


class Command(BaseCommand):
    """`manage.py demo [--once]`."""

    help = "Serve the console and buy a real two-node training run through its API; --once stops everything at the end."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add --once."""
        parser.add_argument("--once", action="store_true", help="stop everything at the end")

    def handle(self, *_args: Any, once: bool, **_options: Any) -> None:
        """Run the demo. Raises CommandError with the reason if it fails (exit status 1) or is interrupted."""
        screen = Console()
        with _serving(screen) as server:
            try:
                accounts = _accounts()
                _write_private(settings.VAR_DIR / "demo.json", accounts)
            except KeyboardInterrupt:
                # The file may lack the accounts, or have passwords that were just replaced.
                raise CommandError(
                    "The demo was interrupted before it bought a run. Run it again (make demo).", returncode=INTERRUPTED
                ) from None
            try:
                _buy_and_show(Customer(settings.TRAINYARD_URL, accounts["customer"]["token"], screen), screen)
            except (DemoFailed, httpx.HTTPError) as error:
                raise CommandError(f"The demo failed: {error}") from error
            except KeyboardInterrupt:
                raise CommandError(
                    "The demo was interrupted. A run that was bought continues to its end, and is charged. "
                    f"To stop it, start the console (make up) and cancel the job at {settings.TRAINYARD_URL}. "
                    f"The accounts are in {settings.VAR_DIR / 'demo.json'}.",
                    returncode=INTERRUPTED,
                ) from None
            if once:
                return
            screen.print(
                f"\nThe console goes on at [bold]{settings.TRAINYARD_URL}[/bold]. Log in as "
                f"{accounts['customer']['email']}, password {accounts['customer']['password']} "
                f"(the administrator's are in {settings.VAR_DIR / 'demo.json'}).",
                highlight=False,
            )
            if server is not None:
                screen.print("Ctrl-C stops it.")
                server.wait()


def _buy_and_show(customer: Customer, screen: Console) -> None:
    """Buy a run as a customer does, follow it, and print its results. Raises DemoFailed."""
    archive = settings.VAR_DIR / "demo" / "digits.tar.gz"
    if not archive.exists():
        archive.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, str(EXAMPLES / "make_digits.py"), str(archive)], check=True)
    call_command("publish_digits", archive=archive)  # for the examples; this customer uploads a copy of its own below
    customer.activate()
    customer.top_up()
    customer.upload_data(archive)
    customer.upload_script(EXAMPLES / "mnist_ddp.py")
    job_id = customer.buy()
    job = customer.follow(job_id)
    screen.print(customer.last_lines(job_id), style="dim", highlight=False)
    if job["state"] != "succeeded":
        raise DemoFailed(f"Job {job_id} {job['state']}: {job['sentence']} {job['detail']}")
    first_loss, last_loss, accuracy = customer.result(job_id)
    screen.print(
        f"\n[bold]Learnt:[/bold] loss {first_loss:.3f} → {last_loss:.3f}, test accuracy {accuracy:.1%}",
        highlight=False,
    )
    screen.print(customer.receipt(job_id))


@contextlib.contextmanager
def _serving(screen: Console) -> Iterator[subprocess.Popen[bytes] | None]:
    """Serve the console during the `with` block. Yield the process that was started for it; None if it already ran."""
    if _is_ready():
        yield None
        return
    # In a session of its own, so that Ctrl-C does not reach it. `finally` below stops it.
    server = subprocess.Popen([sys.executable, str(settings.BASE_DIR / "manage.py"), "up"], start_new_session=True)
    # SIGTERM raises KeyboardInterrupt too, so that it also stops the server.
    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    is_ready = False
    try:
        with screen.status("Starting the console ..."):
            _await_ready(server)
        is_ready = True
        yield server
    except KeyboardInterrupt:
        screen.print("Stopping.")
        if not is_ready:
            raise CommandError("Interrupted before the console was ready.", returncode=INTERRUPTED) from None
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
        signal.signal(signal.SIGTERM, previous_handler)


def _await_ready(server: subprocess.Popen[bytes]) -> None:
    """Wait until the console is ready. Raises CommandError if its process ends or READY_SECONDS have passed."""
    deadline = time.monotonic() + READY_SECONDS
    while not _is_ready():
        if server.poll() is not None:
            raise CommandError("The console did not start; see the lines above.")
        if time.monotonic() > deadline:
            raise CommandError(f"The console was not ready within {READY_SECONDS} s; its logs are in var/log.")
        time.sleep(0.2)  # nothing announces that another process is ready


def _is_ready() -> bool:
    """Whether the console answers and all its parts are ready."""
    try:
        return httpx.get(f"{settings.TRAINYARD_URL}/readyz", timeout=5).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _accounts() -> dict[str, Any]:
    """Return the demo's two accounts, created if needed, with new passwords and tokens."""
    return {
        "url": settings.TRAINYARD_URL,
        "customer": _account("demo@trainyard.example", "Digit Works", is_administrator=False),
        "administrator": _account("admin@trainyard.example", "Trainyard operators", is_administrator=True),
    }


def _account(email: str, organization_name: str, *, is_administrator: bool) -> dict[str, str]:
    """Return e-mail address, password and API token of an account, created if needed."""
    password = secrets.token_urlsafe(12)
    user, _created = User.objects.get_or_create(email=email)
    user.is_staff = user.is_superuser = is_administrator
    user.set_password(password)
    user.save()
    membership = Membership.objects.filter(user=user).first() or create_organization(user=user, name=organization_name)
    for token in membership.tokens.filter(name=LABEL, revoked_at=None):
        revoke_token(token=token, actor=user)
    _token, secret = create_token(membership=membership, name=LABEL)
    return {"email": email, "password": password, "token": secret}


def _write_private(path: Path, data: dict[str, Any]) -> None:
    """Write JSON that only this user can read. The mode is set before the content, also if the file exists."""
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(json.dumps(data, indent=2) + "\n")
