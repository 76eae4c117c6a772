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
    message = _("This path leaves the workspace. Use a path inside it, without '..' and without links.")


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
    message = _("This is larger than allowed, or than what your organization may still store. Delete something first.")


class StorageFull(StorageError):
    """The disk below the console has no room left. Not the customer's doing: an administrator must act."""

    code = "storage_full"
    message = _("The console's storage is full, so nothing was saved. Tell your administrator, and try again later.")


class WrongKind(StorageError):
    """A folder where a file is needed, or the other way round; or a pipe, socket or device, which is neither."""

    code = "wrong_kind"
    message = _("What lies at this path is of another kind than this needs.")


class Unreadable(StorageError):
    """The code that made a file took away the permission to open it."""

    code = "unreadable"
    message = _("The permissions of this file don't let the console open it. Change them in a run, or delete it.")


class NotAScript(FileMissing):
    """A file that is no Python script."""

    code = "not_a_script"
    message = _("Choose a Python script: a file whose name ends in .py.")


class UploadBroken(StorageError):
    """The body ended before the length it announced, or came without a way to tell its end."""

    code = "upload_broken"
    message = _("The upload broke off, so nothing was saved. Send it again.")


class NotText(StorageError):
    """A file that the editor can't show."""

    code = "not_text"
    message = _("This file is not text, so it can't be edited here. Download it instead.")


class InUse(StorageError):
    """The object is used by a run that has not ended."""

    code = "in_use"
    message = _("A run that has not ended uses this. Wait for it, or cancel it first.")
