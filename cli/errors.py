"""The errors of the program, each with its exit status."""

from __future__ import annotations

from collections.abc import Mapping

FAILED, USAGE, JOB_FAILED, JOB_CANCELLED, TOO_EXPENSIVE, DETACHED = 1, 2, 3, 4, 5, 130
"""Exit statuses. TOO_EXPENSIVE: the price is above the user's limit. DETACHED: the user no longer watches the job,
which goes on. click uses 2 for a wrong command line, and shells use 130 (128 + SIGINT) for Ctrl-C."""


class CliError(Exception):
    """A command failed. Programs that read `--json` get `code`, the shell gets `exit_status`.

    `fields` has sentences about invalid values, by the name of the field in the API.
    """

    code = "failed"
    exit_status = FAILED

    def __init__(self, message: str, *, fields: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fields = dict(fields or {})


class NotLoggedIn(CliError):
    """There is no token for the console."""

    code = "not_logged_in"


class UnsafeCredentials(CliError):
    """The file of tokens is damaged or can be read by others, or a token would leave the machine unencrypted."""

    code = "unsafe_credentials"


class Unreachable(CliError):
    """The console did not answer."""

    code = "unreachable"


class UnexpectedAnswer(CliError):
    """The answer is not one of Trainyard's API: the server is another program, or has another version."""

    code = "unexpected_answer"


class UnsafePath(CliError):
    """A file name from the console would be written outside of the target folder."""

    code = "unsafe_path"


class InvalidChoice(CliError):
    """An option or argument cannot be used."""

    code = "invalid"
    exit_status = USAGE


class TooExpensive(CliError):
    """The price is above the customer's limit."""

    code = "too_expensive"
    exit_status = TOO_EXPENSIVE


class ApiError(CliError):
    """The console refused a request. `status` is the HTTP status; code, message and fields come from the answer."""

    def __init__(self, status: int, code: str, message: str, fields: Mapping[str, str] | None = None) -> None:
        super().__init__(message, fields=fields)
        self.status = status
        self.code = code
