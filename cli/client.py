"""The typed client of a console's HTTP API.

Each method calls one operation of the console's OpenAPI schema; a test compares them. The dataclasses of `schemas` are
the results. Methods that return an iterator request further pages when they are needed.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar
from urllib.parse import parse_qs, quote, urlsplit

import httpx

from .decoding import decode
from .errors import ApiError, CliError, UnexpectedAnswer
from .schemas import (
    Dataset,
    Diagnosis,
    Entry,
    Image,
    Job,
    JobEntry,
    Log,
    Model,
    NodeSpec,
    Notebook,
    NotebookExtensionQuote,
    NotebookQuote,
    Order,
    Product,
    Quote,
    Receipt,
    Sweep,
    SweepQuote,
    Trial,
    Upload,
    WhoAmI,
    Workspace,
)
from .transport import Event, Transport

T = TypeVar("T")
TUS_HEADERS = {"Tus-Resumable": "1.0.0"}
"""The header with the version of tus, the protocol of resumable uploads. Each request about an upload needs it."""
UPLOAD_TYPE = "application/offset+octet-stream"
"""The content type that tus requires for a part of an upload."""
Curves = dict[str, tuple[tuple[float, ...], ...]]
"""Points by the name of the curve. A point is a step and a value."""


class Client:
    """A console's API. All methods raise the errors of `errors`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def url(self) -> str:
        """Return the console's address."""
        return self._transport.url

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    # The organization and what is on sale

    def whoami(self) -> WhoAmI:
        """Return the account and organization of the token."""
        return decode(WhoAmI, self._get("whoami/"))

    def products(self) -> list[Product]:
        """List the products on offer."""
        return _decode_results(Product, self._get("products/"))

    def node_specs(self) -> list[NodeSpec]:
        """List the node types on sale."""
        return _decode_results(NodeSpec, self._get("node-specs/"))

    def images(self) -> Iterator[Image]:
        """List the images on offer."""
        return self._get_pages("images/", Image)

    # Datasets

    def datasets(self) -> Iterator[Dataset]:
        """List the datasets, newest first."""
        return self._get_pages("datasets/", Dataset)

    def dataset(self, name: str) -> Dataset:
        """Return a dataset."""
        return decode(Dataset, self._get(f"datasets/{_escape_part(name)}/"))

    def create_dataset(self, name: str) -> Dataset:
        """Create a dataset without a version."""
        return decode(Dataset, self._transport.json("POST", "datasets/", json={"name": name}))

    def create_upload(self, *, size_bytes: int, metadata: Mapping[str, str]) -> str:
        """Create a resumable upload and return its id. `metadata` tells the console what the upload is for."""
        pairs = ",".join(f"{name} {b64encode(value.encode()).decode()}" for name, value in metadata.items())
        headers = TUS_HEADERS | {"Upload-Length": str(size_bytes), "Upload-Metadata": pairs}
        response = self._transport.request("POST", "uploads/", headers=headers)
        # Only the last part of the address is used, because the token must not be sent to another host.
        upload_id: str = urlsplit(response.headers.get("Location", "")).path.rstrip("/").rpartition("/")[2]
        if not upload_id:
            raise UnexpectedAnswer("The console created an upload without an address.")
        return upload_id

    def upload_offset(self, upload_id: str) -> int:
        """Return the number of bytes of an upload that the console has."""
        return _read_offset(self._transport.request("HEAD", f"uploads/{_escape_part(upload_id)}/", headers=TUS_HEADERS))

    def append_upload(self, upload_id: str, *, offset: int, content: Iterable[bytes], size: int) -> int:
        """Send the next `size` bytes of an upload and return the new offset.

        Once the request has begun to read `content`, it is not repeated, because `content` can be read only once.
        """
        headers = TUS_HEADERS | {"Upload-Offset": str(offset), "Content-Type": UPLOAD_TYPE, "Content-Length": str(size)}
        response = self._transport.request(
            "PATCH", f"uploads/{_escape_part(upload_id)}/", headers=headers, content=content
        )
        return _read_offset(response)

    def upload(self, upload_id: str) -> Upload:
        """Return an upload: its state, and its result or error."""
        return decode(Upload, self._get(f"uploads/{_escape_part(upload_id)}/"))

    # Workspaces

    def workspaces(self) -> Iterator[Workspace]:
        """List the workspaces, newest first."""
        return self._get_pages("workspaces/", Workspace)

    def workspace(self, name: str) -> Workspace:
        """Return a workspace."""
        return decode(Workspace, self._get(f"workspaces/{_escape_part(name)}/"))

    def create_workspace(self, name: str) -> Workspace:
        """Create an empty workspace."""
        return decode(Workspace, self._transport.json("POST", "workspaces/", json={"name": name}))

    def differing_files(self, workspace: str, files: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the paths of the files that the workspace lacks or has with other bytes.

        `files` are dictionaries with `path`, `size` in bytes and `sha256` in hexadecimal.
        """
        path = f"workspaces/{_escape_part(workspace)}/compare/"
        data = self._transport.json("POST", path, json={"files": list(files)})
        return list(decode(dict[str, tuple[str, ...]], data)["differing"])

    def workspace_entries(self, workspace: str, folder: str = "") -> Iterator[Entry]:
        """List a folder of a workspace by name."""
        path, after = f"workspaces/{_escape_part(workspace)}/files/{_escape_path(folder)}", ""
        while True:
            data = self._get(path, params={"after": after} if after else {})
            yield from decode(tuple[Entry, ...], data.get("entries"))
            after = _next_cursor(data, "after")
            if not after:
                return

    def write_file(self, workspace: str, path: str, content: bytes) -> None:
        """Create or replace a file of a workspace."""
        self._transport.request(
            "PUT", f"workspaces/{_escape_part(workspace)}/files/{_escape_path(path)}", content=content
        )

    def delete_file(self, workspace: str, path: str) -> None:
        """Move a file or folder of a workspace to its recycle bin."""
        self._transport.request("DELETE", f"workspaces/{_escape_part(workspace)}/files/{_escape_path(path)}")

    # Quotes, orders and jobs

    def quote(self, form: Mapping[str, Any]) -> Quote:
        """Price a run. `form` has the fields of POST /api/v1/quotes/."""
        return decode(Quote, self._transport.json("POST", "quotes/", json=dict(form)))

    def order(self, quote_id: str) -> Order:
        """Buy a quote. A repeated call returns the same order and buys nothing."""
        return decode(Order, self._buy("orders/", quote_id))

    def jobs(self, *, state: str = "", tag: str = "", name: str = "") -> Iterator[Job]:
        """List the jobs, newest first."""
        filters = {"state": state, "tag": tag, "name": name}
        return self._get_pages("jobs/", Job, {key: value for key, value in filters.items() if value})

    def job(self, job_id: int) -> Job:
        """Return a job."""
        return decode(Job, self._get(f"jobs/{job_id}/"))

    def diagnosis(self, job_id: int) -> Diagnosis | None:
        """Return why a job failed. Returns None if it did not fail, or does not exist."""
        try:
            return decode(Diagnosis, self._get(f"jobs/{job_id}/diagnosis/"))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def cancel(self, job_id: int) -> Job:
        """Stop a job."""
        return decode(Job, self._transport.json("POST", f"jobs/{job_id}/cancel/"))

    def log(
        self, job_id: int, *, rank: int = 0, attempt: int | None = None, offset: int = 0, timestamps: bool = False
    ) -> Log:
        """Return the part of a rank's output that begins at the byte `offset`; of the latest attempt by default."""
        return decode(Log, self._get(f"jobs/{job_id}/logs/", params=_log_query(rank, attempt, offset, timestamps)))

    def log_events(
        self, job_id: int, *, rank: int = 0, attempt: int | None = None, offset: int = 0, timestamps: bool = False
    ) -> Iterator[Event]:
        """Stream a rank's output from the byte `offset` on, as `log` events whose data has the fields of Log."""
        return self._transport.events(f"jobs/{job_id}/logs/", params=_log_query(rank, attempt, offset, timestamps))

    def job_events(self, job_id: int) -> Iterator[Event]:
        """Stream the changes of a job.

        The data of a `state` event has the fields of Job. A `metrics` event has new points, by the name of the curve.
        """
        return self._transport.events(f"jobs/{job_id}/stream/")

    def metrics(self, job_id: int) -> Curves:
        """Return the curves of a job."""
        return decode(dict[str, Curves], self._get(f"jobs/{job_id}/metrics/")).get("metrics", {})

    def receipt(self, job_id: int) -> Receipt:
        """Return the receipt of an ended job. Raises ApiError (404) before its end."""
        return decode(Receipt, self._get(f"jobs/{job_id}/receipt/"))

    def receipts(self) -> list[Receipt]:
        """List the last 100 receipts, newest first. The console returns no more."""
        return _decode_results(Receipt, self._get("wallet/receipts/"))

    # Sweeps

    def quote_sweep(self, form: Mapping[str, Any]) -> SweepQuote:
        """Price a sweep."""
        return decode(SweepQuote, self._transport.json("POST", "sweeps/quotes/", json=dict(form)))

    def quote_extension(self, sweep_id: int, form: Mapping[str, Any]) -> SweepQuote:
        """Price more trials of an ended sweep."""
        return decode(SweepQuote, self._transport.json("POST", f"sweeps/{sweep_id}/extend/", json=dict(form)))

    def order_sweep(self, quote_id: str) -> Sweep:
        """Buy the quote of a sweep. A repeated call returns the same sweep and buys nothing."""
        return decode(Sweep, self._buy("sweeps/", quote_id))

    def sweeps(self) -> Iterator[Sweep]:
        """List the sweeps, newest first."""
        return self._get_pages("sweeps/", Sweep)

    def sweep(self, sweep_id: int) -> Sweep:
        """Return a sweep."""
        return decode(Sweep, self._get(f"sweeps/{sweep_id}/"))

    def trials(self, sweep_id: int) -> list[Trial]:
        """List the trials of a sweep in order of number."""
        return _decode_results(Trial, self._get(f"sweeps/{sweep_id}/trials/"))

    def stop_sweep(self, sweep_id: int) -> Sweep:
        """Start no more trials of a sweep, and stop the open ones."""
        return decode(Sweep, self._transport.json("POST", f"sweeps/{sweep_id}/stop/"))

    # Notebooks

    def quote_notebook(self, form: Mapping[str, Any]) -> NotebookQuote:
        """Price a notebook."""
        return decode(NotebookQuote, self._transport.json("POST", "notebooks/quotes/", json=dict(form)))

    def order_notebook(self, quote_id: str) -> Notebook:
        """Buy the quote of a notebook. A repeated call returns the same notebook and buys nothing."""
        return decode(Notebook, self._buy("notebooks/", quote_id))

    def quote_notebook_extension(self, notebook_id: int, *, added_seconds: int) -> NotebookExtensionQuote:
        """Price more time for a running notebook. Buy the quote with `order_notebook`."""
        form = {"added_seconds": added_seconds}
        answer = self._transport.json("POST", f"notebooks/{notebook_id}/extend/", json=form)
        return decode(NotebookExtensionQuote, answer)

    def notebooks(self) -> Iterator[Notebook]:
        """List the notebooks, newest first."""
        return self._get_pages("notebooks/", Notebook)

    def notebook(self, notebook_id: int) -> Notebook:
        """Return a notebook."""
        return decode(Notebook, self._get(f"notebooks/{notebook_id}/"))

    def stop_notebook(self, notebook_id: int) -> Notebook:
        """Stop a notebook."""
        return decode(Notebook, self._transport.json("POST", f"notebooks/{notebook_id}/stop/"))

    # Files of jobs, and models

    def job_files(self, job_id: int, folder: str = "") -> Iterator[JobEntry]:
        """List a folder of a job's files."""
        query = {"path": folder} if folder else {}
        while True:
            data = self._get(f"jobs/{job_id}/files/", params=query)
            yield from _decode_results(JobEntry, data)
            after = _next_cursor(data, "after")
            if not after:
                return
            query["after"] = after

    def job_file(
        self, job_id: int, path: str, *, offset: int = 0, etag: str = ""
    ) -> AbstractContextManager[httpx.Response]:
        """Open a file of a job as a stream of its bytes.

        If the file still has the ETag `etag`, the bytes begin at `offset` and the status is 206. Otherwise the file is
        read from its beginning, with status 200.
        """
        headers = {"Range": f"bytes={offset}-", "If-Range": etag} if offset and etag else {}
        return self._transport.stream(f"jobs/{job_id}/files/{_escape_path(path)}", headers=headers)

    def models(self) -> Iterator[Model]:
        """List the models, newest first."""
        return self._get_pages("models/", Model)

    def model(self, name: str) -> Model:
        """Return a model."""
        return decode(Model, self._get(f"models/{_escape_part(name)}/"))

    def model_archive(self, name: str, version: int | None = None) -> AbstractContextManager[httpx.Response]:
        """Open the .tar.gz archive of a model's version (default: the latest) as a stream of its bytes."""
        query = {"version": version} if version is not None else {}
        return self._transport.stream(f"models/{_escape_part(name)}/archive/", params=query)

    def _buy(self, path: str, quote_id: str) -> Any:
        """Buy a quote, and return the JSON of the order, sweep or notebook.

        The idempotency key depends on the quote alone. So the request may be repeated after a lost answer, and the
        quote is still bought once.
        """
        headers = {"Idempotency-Key": f"trainyard-cli-{quote_id}"}
        try:
            return self._transport.json("POST", path, json={"quote": quote_id}, headers=headers)
        except CliError as error:
            # A user who runs the command again gets a new quote, which would be bought in addition.
            if not isinstance(error, ApiError) or error.status >= 500:
                error.message += f" The purchase may have been made: look at {self.url} before you buy again."
            raise

    def _get(self, path: str, params: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON of the answer to a GET request."""
        return self._transport.json("GET", path, params=dict(params or {}))

    def _get_pages(self, path: str, kind: type[T], query: Mapping[str, str] | None = None) -> Iterator[T]:
        """Yield the results of all pages of a list."""
        query = dict(query or {})
        while True:
            data = self._get(path, params=query)
            yield from _decode_results(kind, data)
            cursor = _next_cursor(data, "cursor")
            if not cursor:
                return
            query["cursor"] = cursor


def _decode_results(kind: type[T], data: Any) -> list[T]:
    """Return the results in a list's answer, `{"results": [...]}`. Raises UnexpectedAnswer."""
    results = data.get("results") if isinstance(data, dict) else None
    return [decode(kind, result) for result in decode(tuple[Any, ...], results)]


def _next_cursor(data: Any, name: str) -> str:
    """Return the cursor in the address of the next page, which is its query parameter `name`; empty on the last page.

    The rest of the address is ignored, because the token must not be sent to another host.
    """
    next_url = decode(dict[str, Any], data).get("next") or ""
    return parse_qs(urlsplit(str(next_url)).query).get(name, [""])[0]


def _log_query(rank: int, attempt: int | None, offset: int, timestamps: bool) -> dict[str, int]:
    """Return the query of a request for a rank's output."""
    query = {"rank": rank, "offset": offset}
    if attempt is not None:
        query["attempt"] = attempt
    if timestamps:
        query["timestamps"] = 1
    return query


def _read_offset(response: httpx.Response) -> int:
    """Return how many bytes of an upload the console has, according to its response. Raises UnexpectedAnswer."""
    text = response.headers.get("Upload-Offset", "")
    if not (text.isascii() and text.isdecimal() and len(text) < 20):  # 20 digits: larger than any file
        raise UnexpectedAnswer("The console did not say how much of the upload it has.")
    return int(text)


def _escape_part(name: str) -> str:
    """Escape a name for use as one part of a URL's path: slashes are escaped too."""
    return quote(name, safe="")


def _escape_path(path: str) -> str:
    """Escape a file's path for use in a URL's path: slashes stay."""
    return quote(path, safe="/")
