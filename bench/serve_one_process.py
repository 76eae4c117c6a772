"""Serve an ASGI application with the console's HTTP protocol in one process: `serve_one_process MODULE:NAME PORT`."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")

import uvicorn

from console.serving.protocol import GuardedProtocol

if __name__ == "__main__":
    uvicorn.run(sys.argv[1], port=int(sys.argv[2]), http=GuardedProtocol, ws="none", log_config=None, access_log=False)
