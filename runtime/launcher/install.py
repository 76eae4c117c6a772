"""The platform's script that installs packages: it runs uv with the options in `$DATASETS_PATH/inputs/plan.json`.

The script runs in a sandbox, since packages that are published as source run their own code when they are built. On the
local backend the sandbox has no network. uv's requests then go to a port of the sandbox's loopback, and this script
passes them on to a mounted socket. On that socket a proxy of the console listens, which connects only to package
indexes (`runtime.packages.proxy`). On Kubernetes, the pod's network policy allows the connections to the index.

Fields of `plan.json`:

    uv              path of uv
    arguments       further arguments of `uv pip install`
    environment     {name: value} for uv
    proxy           path of the proxy's socket; without it, uv connects itself
    cache           folder of uv's cache; without it, a temporary one
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from typing import Any, Dict, List

_CHUNK_BYTES = 1 << 16
"""Maximum bytes that are copied at a time between uv and the proxy."""
_DIST_INFO = re.compile(r"([A-Za-z0-9][A-Za-z0-9._]*)-([A-Za-z0-9][A-Za-z0-9.!+_]*)\.dist-info")
"""A folder with the metadata of an installed package. Installers leave other folders behind, such as
`~orch-2.0.dist-info`."""
_PTH_LOADER = "sitecustomize.py"
"""The name of the module that `write_pth_loader` adds. Python imports a module of this name when it starts."""
_PTH_LOADER_SOURCE = '''"""Process the .pth files beside this file, then run the image's own sitecustomize, if any.

Python itself processes .pth files only in the folders of its own packages.
"""

import importlib.machinery
import importlib.util
import os
import site
import sys

_folder = os.path.dirname(os.path.abspath(__file__))
site.addsitedir(_folder)
_spec = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [path for path in sys.path if os.path.abspath(path) != _folder]
)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
'''


def main() -> int:
    """Install; return uv's exit code."""
    with open(os.path.join(os.environ["DATASETS_PATH"], "inputs", "plan.json"), encoding="utf-8") as file:
        plan: Dict[str, Any] = json.load(file)
    target, temporary = (os.path.join(os.environ["RUN_DIR"], name) for name in ("site-packages", "tmp"))
    for folder in (target, temporary):
        os.mkdir(folder)
    # uv keeps packages that are installed already. With copies of the image's metadata, it installs only packages that
    # the image lacks. The constraints keep it from adding other versions of the image's packages.
    metadata_folders = copy_image_metadata(target)
    constraints = os.path.join(temporary, "constraints.txt")
    with open(constraints, "w", encoding="utf-8") as file:
        matches = map(_DIST_INFO.fullmatch, metadata_folders)
        file.writelines("{}=={}\n".format(*match.groups()) for match in matches if match)
    environment = {**os.environ, **plan["environment"], "TMPDIR": temporary}
    environment["UV_CACHE_DIR"] = plan.get("cache") or os.path.join(temporary, "cache")
    if "proxy" in plan:
        address = "http://127.0.0.1:{}".format(serve_proxy(plan["proxy"]))
        environment.update(dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), address))
    command = [plan["uv"], "pip", "install", "--python", sys.executable, "--target", target]
    command += ["--constraints", constraints, *plan["arguments"]]
    exit_code = subprocess.run(command, env=environment, check=False).returncode
    for name in metadata_folders:  # the copies were only for uv
        shutil.rmtree(os.path.join(target, name), ignore_errors=True)
    if exit_code == 0:
        write_pth_loader(target)
    return exit_code


def write_pth_loader(target: str) -> None:
    """Let interpreters that have `target` on PYTHONPATH process its .pth files, if there are any."""
    path = os.path.join(target, _PTH_LOADER)
    if any(name.endswith(".pth") for name in os.listdir(target)) and not os.path.lexists(path):
        with open(path, "w", encoding="utf-8") as file:
            file.write(_PTH_LOADER_SOURCE)


def copy_image_metadata(target: str) -> List[str]:
    """Copy the metadata of the image's packages to `target`; return the names of the copies.

    If two folders of `sys.path` have the same package, the metadata is that of the first, from which Python imports.
    """
    copies: Dict[str, str] = {}  # the folder of each package's metadata, by the package's name
    for folder in filter(os.path.isdir, sys.path):
        for name in sorted(os.listdir(folder)):
            match = _DIST_INFO.fullmatch(name)
            package = re.sub(r"[._]+", "-", match.group(1)).lower() if match else ""
            if match and package not in copies:
                copies[package] = name
                shutil.copytree(os.path.join(folder, name), os.path.join(target, name))
    return list(copies.values())


def serve_proxy(path: str) -> int:
    """Pass connections to a port of the loopback on to the socket at `path`; return the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, path), daemon=True).start()
    return int(listener.getsockname()[1])


def _accept(listener: socket.socket, path: str) -> None:
    """Connect each client to the socket at `path`, with a thread for each direction."""
    while True:
        client, _address = listener.accept()
        upstream = socket.socket(socket.AF_UNIX)
        try:
            upstream.connect(path)
        except OSError:
            client.close()  # uv then reports that it cannot reach the index
            continue
        for source, destination in ((client, upstream), (upstream, client)):
            threading.Thread(target=_pipe, args=(source, destination), daemon=True).start()


def _pipe(source: socket.socket, destination: socket.socket) -> None:
    """Copy bytes until the source ends, then close the writing side of the destination."""
    try:
        while True:
            data = source.recv(_CHUNK_BYTES)
            if not data:
                break
            destination.sendall(data)
        destination.shutdown(socket.SHUT_WR)
    except OSError:  # one side is gone, so the connection to the other ends too
        for end in (source, destination):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # a close would not wake the thread of the other direction


if __name__ == "__main__":
    sys.exit(main())
