"""What storage may refuse. One root, stable codes."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from console.accounts.errors import CustomerError


class StorageError(CustomerError):
    """Root of storage's errors."""

    code = "storage_error"


class UnsafePath(StorageError):
    """A path that leaves its folder, by `..`, by being absolute, or by a link."""

    code = "unsafe_path"
    message = _("This path leaves the workspace. Use a path inside it, without '..' and without links that lead out.")


class FileMissing(StorageError):
    """No file at this path."""

    code = "file_not_found"
    message = _("There is no file at this path.")


class NameTaken(StorageError):
    """An object of this name exists."""

    code = "name_taken"
    message = _("This name is taken. Choose another one.")


class BadArchive(StorageError):
    """An archive that can't be unpacked, or not safely."""

    code = "bad_archive"
    message = _("This archive can't be read. Send a .tar, .tar.gz or .zip file.")


class TooLarge(StorageError):
    """More bytes or files than the quota or a limit allows."""

    code = "too_large"
    message = _("This is larger than your organization may store.")


class NotText(StorageError):
    """A file that the editor can't show."""

    code = "not_text"
    message = _("This file is not text, so it can't be edited here. Download it instead.")


class InUse(StorageError):
    """The object is used by a run that has not ended."""

    code = "in_use"
    message = _("A run that has not ended uses this. Wait for it, or cancel it first.")
