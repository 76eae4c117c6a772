"""The program `trainyard`: its commands and the handling of errors."""

from __future__ import annotations

import sys
from typing import Any

import click

from . import VERSION
from .commands import account, datasets, jobs, models, notebooks, runs, sweeps, workspaces
from .errors import DETACHED, CliError, InvalidChoice
from .session import Session


class Program(click.Group):
    """The group of all commands. It prints the error of a failed command, and exits with the error's exit status."""

    def invoke(self, context: click.Context) -> Any:
        """Run the command."""
        session = context.ensure_object(Session)
        try:
            return super().invoke(context)
        except CliError as error:
            session.screen.error(error.code, error.message, error.fields)
            context.exit(error.exit_status)
        except BrokenPipeError:
            # The reader of the output, such as `| head`, has ended. When Python exits, it flushes the output again and
            # would print a warning about the same error.
            sys.stderr.close()
            context.exit(1)
        except OSError as error:  # of a file that cannot be read or written
            sentence = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            session.screen.error(CliError.code, sentence, {})
            context.exit(CliError.exit_status)
        except UnicodeError:
            sentence = "An option, argument, token or input has characters that cannot be sent."
            session.screen.error(InvalidChoice.code, sentence, {})
            context.exit(InvalidChoice.exit_status)
        except KeyboardInterrupt:  # Ctrl-C ends this program only: a job that it has bought goes on
            context.exit(DETACHED)


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--url",
    default="",
    metavar="URL",
    help="The console. Default: TRAINYARD_URL, else the one that you logged in to last. TRAINYARD_TOKEN is sent only "
    "to the console at TRAINYARD_URL.",
)
@click.version_option(VERSION, prog_name="trainyard")
@click.pass_context
def main(context: click.Context, url: str) -> None:
    """Buy, run and watch distributed training on a Trainyard console.

    Begin with `trainyard login`, then `trainyard run train.py` in your project's folder.
    """
    context.ensure_object(Session).url = url


for command in (
    account.login, account.logout, account.whoami, runs.run, runs.quote, jobs.jobs, jobs.status, jobs.logs,
    jobs.metrics, jobs.stop, jobs.files, jobs.receipts, sweeps.sweep, datasets.datasets, workspaces.workspace,
    models.models, notebooks.notebook,
):  # fmt: skip
    main.add_command(command)
