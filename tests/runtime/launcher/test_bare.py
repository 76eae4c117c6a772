from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.launcher import bare
from runtime.launcher.bare import EVENT_READ, Selector

LAUNCHER = Path(bare.__file__).parent


def test_the_selector_says_what_can_be_read() -> None:
    selector = bare._Selector()
    (silent, _one), (spoken, other) = os.pipe(), os.pipe()
    selector.register(silent, EVENT_READ, "silent")
    selector.register(spoken, EVENT_READ, "spoken")
    with pytest.raises(KeyError):
        selector.register(spoken, EVENT_READ, "again")
    assert selector.select(0) == []
    os.write(other, b"!")
    assert [key.data for key, _events in selector.select(10)] == ["spoken"]
    os.close(other)
    os.read(spoken, 1)
    assert [key.data for key, _events in selector.select(None)] == ["spoken"]  # its end is to be read
    selector.unregister(spoken)
    assert selector.select(0.001) == []
    with pytest.raises(KeyError):
        selector.unregister(spoken)
    for descriptor in (silent, _one, spoken):
        os.close(descriptor)


def test_the_selector_is_ours_where_it_counts() -> None:
    assert Selector is bare._Selector


HIDDEN = """
import os, sys
sys.path.insert(0, sys.argv[1])
from launcher import bare
import ctypes
bare.hide()
print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
"""


def test_a_process_hides() -> None:
    command = [sys.executable, "-I", "-c", HIDDEN, str(LAUNCHER.parent)]
    assert subprocess.run(command, capture_output=True, check=True, text=True).stdout == "0\n"


WITHOUT = """
import sys
import ctypes, json, selectors, signal, socket
for name in ("_signal", "_socket", "_json"):
    sys.modules[name] = None
sys.path.insert(0, sys.argv[1])
from launcher import bare, plain
assert bare.signal is signal and bare.socket is socket.socket and plain.loads is json.loads
sys.modules["_ctypes"] = None
bare.hide()
print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
"""


def test_without_the_modules_below_the_public_ones_serve() -> None:
    command = [sys.executable, "-I", "-c", WITHOUT, str(LAUNCHER.parent)]
    assert subprocess.run(command, capture_output=True, check=True, text=True).stdout == "0\n"
