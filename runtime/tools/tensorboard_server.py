"""Run TensorBoard on a listening socket that this process inherits. This program runs inside the sandbox.

Arguments: the socket's file descriptor, the folder with the logs, and the path of TensorBoard's URL.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from tensorboard import default, program
from tensorboard.compat.tensorflow_stub.io import gfile
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server


class QuietHandler(WSGIRequestHandler):
    """Logs no requests, since the console logs them."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing."""


class RegularFiles(gfile.LocalFileSystem):  # type: ignore[misc]  # TensorBoard has no types
    """Folders and regular files only. A run can create a FIFO, and opening it would wait for a writer forever."""

    def exists(self, filename: bytes | str) -> bool:
        """Return whether TensorBoard may open this file or folder. It asks before it opens one."""
        # Not by `Path`, which takes no bytes, and raises an error for a folder that may not be searched.
        return os.path.isfile(filename) or os.path.isdir(filename)  # noqa: PTH112, PTH113


class InheritedSocket(program.TensorBoardServer):  # type: ignore[misc]  # TensorBoard has no types
    """Serves on the socket that this process has inherited."""

    descriptor = -1
    """The socket's file descriptor. TensorBoard creates the server itself, so `main` passes it by this attribute."""

    def __init__(self, wsgi_app: Any, _flags: object) -> None:
        self._server: BaseWSGIServer = make_server(
            "unix://",  # tells werkzeug that the descriptor is a Unix socket
            0,
            wsgi_app,
            threaded=True,
            request_handler=QuietHandler,
            fd=self.descriptor,
        )

    def serve_forever(self) -> None:
        """Serve until the process is ended."""
        self._server.serve_forever()

    def get_url(self) -> str:
        """Return a placeholder. TensorBoard takes only a port from it, for a file in /tmp that nothing reads."""
        return "http://localhost:0/"


def main() -> None:
    """Serve until the process is ended."""
    InheritedSocket.descriptor = int(sys.argv[1])
    gfile.register_filesystem("", RegularFiles())  # "" stands for paths without a protocol, such as s3://
    # Only TensorBoard's own plugins, since plugins of other packages might show any file of the sandbox.
    board = program.TensorBoard(default.get_static_plugins(), server_class=InheritedSocket)
    # With `load_fast`, TensorBoard would read the logs in a second process, its data server. With `reload_multifile`,
    # it follows all files of a folder, not only the newest: several ranks and attempts may write there.
    board.configure(
        ["tensorboard", "--logdir", sys.argv[2], "--path_prefix", sys.argv[3], "--load_fast", "false",
         "--reload_interval", "5", "--reload_multifile", "true"]
    )  # fmt: skip
    board.main()


if __name__ == "__main__":
    main()
