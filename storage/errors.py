"""Errors of storage that customers see. Programs rely on their codes, which therefore never change."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from console.core.errors import CustomerError


class StorageError(CustomerError):
    """Root of storage's errors."""

    code = "storage_error"


class UnsafePath(StorageError):
    """A path leads out of its folder: by `..`, because it is absolute, or through a link."""

    code = "unsafe_path"
    message = _("This path leaves its folder. Use a path inside it, without '..' or links.")


class FileMissing(StorageError):
    """There is no file at this path."""

    code = "file_not_found"
    message = _("There is no file at this path.")


class NameTaken(StorageError):
    """An object with this name exists already."""

    code = "name_taken"
    message = _("This name is taken. Choose another one.")


class BadArchive(StorageError):
    """An archive cannot be unpacked, or has entries that are not allowed."""

    code = "bad_archive"
    message = _("This archive can't be read. Send a .tar, .tar.gz or .zip file.")


class TooLarge(StorageError):
    """There are more bytes or files than the quota or a limit allows."""

    code = "too_large"
    message = _("This exceeds the size limit or your remaining storage quota. Delete something first.")


class TooMany(StorageError):
    """The organization has as many datasets, workspaces or models as its quota allows."""

    code = "quota_exceeded"
    message = _("Your organization has reached a limit of its quota. Delete something first.")


class StorageFull(StorageError):
    """The console's disk is full. The customer cannot fix this; an administrator must."""

    code = "storage_full"
    message = _("The console's storage is full. Nothing was saved. Contact your administrator and try again later.")


class WrongKind(StorageError):
    """The path leads to a folder where a file is needed or vice versa, or to a pipe, socket or device."""

    code = "wrong_kind"
    message = _("This path is of the wrong type. Check whether a file or a folder is needed.")


class Unreadable(StorageError):
    """The file's permissions do not let the console open it."""

    code = "unreadable"
    message = _("The file's permissions don't let the console open it. Change them in a run, or delete the file.")


class SourceChanged(StorageError):
    """A process changed the files while they were copied."""

    code = "source_changed"
    message = _("The files changed while they were copied. Nothing was saved. Try again when nothing writes to them.")


class NotAScript(FileMissing):
    """The file is not a Python script, so there is no script at this path."""

    code = "not_a_script"
    message = _("Choose a Python script: a file whose name ends in .py.")


class UploadBroken(StorageError):
    """The connection broke before the end of the request's body."""

    code = "upload_broken"
    message = _("The upload was interrupted. Nothing was saved. Upload it again.")


class TooManyUploads(StorageError):
    """The organization has the maximum number of uploads in progress."""

    code = "too_many_uploads"
    message = _("Your organization has too many uploads in progress. Wait for one to finish.")


class NotText(StorageError):
    """The editor cannot show the file."""

    code = "not_text"
    message = _("This file is not text and can't be edited here. Download it instead.")


class FileChanged(StorageError):
    """The file has changed since the caller read it, or it exists although the caller expects none."""

    code = "file_changed"
    message = _("Someone else changed this file meanwhile. Nothing was saved. Load it again and repeat your change.")


class GitFailed(StorageError):
    """A git repository cannot be read."""

    code = "git_failed"
    message = _("The repository can't be read. Check its address, its branch and the access token.")


class InUse(StorageError):
    """A run that has not ended uses the object."""

    code = "in_use"
    message = _("A run that has not ended uses this. Wait for the run to end, or cancel it first.")


class OffsetConflict(StorageError):
    """The offset in the request is not the upload's current offset."""

    code = "offset_conflict"
    message = _("The upload has another offset. Read its offset and continue from there.")


class ChecksumMismatch(StorageError):
    """The bytes in the request do not match the checksum that was sent with them."""

    code = "checksum_mismatch"
    message = _("The bytes don't match their checksum and were dropped. Send them again.")


class UploadEnded(StorageError):
    """The upload failed or expired, so it accepts no more bytes."""

    code = "upload_ended"
    message = _("This upload has ended. Start a new one.")


class BucketUnavailable(StorageError):
    """The bucket for direct uploads does not answer, or refuses a request."""

    code = "bucket_unavailable"
    message = _("The storage for large uploads can't be reached. Try again in a minute.")


class SecretUnreadable(StorageError):
    """A stored secret can no longer be decrypted, because the installation's SECRET_KEY has changed."""

    code = "secret_unreadable"
    message = _("A secret can't be decrypted any more. Set its value again.")
