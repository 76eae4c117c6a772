"""The report and the output of a rank's wrapper after an exception, and what the launcher reads in a forged report."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.launcher.worker_group import Rank

RANK = Path(__file__).resolve().parents[3] / "runtime" / "launcher" / "rank.py"


def run(folder, source):
    """Run a script; return the fields of its last report, its output and its exit code."""
    script = folder / "train.py"
    script.write_text(source)
    reading, writing = os.pipe()
    command = [sys.executable, "-u", str(RANK), f"{writing},-1", str(script)]  # -1: steps are not counted
    done = subprocess.run(
        command, pass_fds=[writing], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        reported = pipe.read().decode()
    assert len(reported) <= 4096, "a pipe takes only this much in one piece"
    return reported.splitlines()[-1].split("\t"), done.stdout, done.returncode


@pytest.mark.parametrize(
    ("source", "fields"),  # `fields`: type, text, file, line and function; None is not compared
    [
        ("raise ValueError('wrong', 3)", ["ValueError", "('wrong', 3)", "train.py", "1", ""]),
        ("def f():\n  assert 0\nf()", ["AssertionError", "", "train.py", "2", "f"]),
        ("import json\njson.loads('{')", ["json.decoder.JSONDecodeError", None, "train.py", "2", ""]),
        ("x = (", ["SyntaxError", "'(' was never closed", "train.py", "1", ""]),
        (  # in a module that the script imports
            "open(__file__[:-8] + 'model.py', 'w').write('\\nx = (')\nimport model",
            ["SyntaxError", "'(' was never closed", "model.py", "2", ""],
        ),
        (  # in a text that is no code of the script
            "import ast\nast.parse('x = (', 'page.html')",
            ["SyntaxError", "'(' was never closed", "train.py", "2", ""],
        ),
        ("eval('x = (')", ["SyntaxError", None, "train.py", "1", ""]),
        ("raise RuntimeError('two\\tparts\\nand a line')", ["RuntimeError", "two parts", "train.py", "1", ""]),
        # A first line that ends with a colon only introduces the others.
        ("raise RuntimeError('Graph execution error:\\n\\nwrong size')", ["RuntimeError", "wrong size", None, "1", ""]),
        (  # an error that quotes the traceback of a child process
            "raise RuntimeError('Process 1:\\n\\nTraceback (most recent call last):\\n  File \"a\"\\nKeyError: 5\\n')",
            ["RuntimeError", "KeyError: 5", None, "1", ""],
        ),
        (  # an error inside a TensorFlow function
            "raise ValueError('in user code:\\n  File \"a.py\", line 5, in f *\\n    return a\\n\\n  KeyError: b')",
            ["ValueError", "KeyError: b", None, "1", ""],
        ),
        ("class Bad(Exception):\n  def __str__(self): raise OSError\nraise Bad", ["Bad", "", "train.py", "3", ""]),
        # A report has at most 400 bytes of the text, and "é" takes two.
        ("raise RuntimeError('é' * 100_000)", ["RuntimeError", "é" * 200, "train.py", "1", ""]),
        ("import sys; sys.exit(7)", ["SystemExit", "7", "train.py", "1", ""]),
        ("raise SystemExit('no data')", ["SystemExit", "1", "train.py", "1", ""]),
    ],
)
def test_the_wrapper_reports_an_exception(tmp_path, source, fields):
    (kind, *reported), _log, code = run(tmp_path, source)
    assert kind.startswith("raised ")
    # After these fields, `reported` has those of the chain.
    assert [result for result, wanted in zip(reported, fields, strict=False) if wanted is not None] == [
        wanted for wanted in fields if wanted is not None
    ]
    assert code == (7 if "exit(7)" in source else 1)


def test_the_wrapper_reports_the_chain_of_exceptions(tmp_path):
    source = (
        "try: raise ConnectionResetError(104, 'reset')\n"
        "except OSError as error: raise RuntimeError('step 5') from error\n"
    )
    reported, log, _code = run(tmp_path, source)
    # After `raised` and the exception's five fields come type and text of each exception in its chain, itself first.
    assert reported[1 + 5 :] == ["RuntimeError", "step 5", "ConnectionResetError", "[Errno 104] reset"]
    assert "rank.py" not in log


def test_tracebacks_contain_no_frames_of_the_wrapper(tmp_path):
    # TensorFlow puts such a traceback into the exception's text.
    text = f'Detected at node\\n  File "{RANK}", line 3, in <module>\\n\\n  File "train.py", line 1\\nwrong'
    _report, log, code = run(tmp_path, f"text = '{text}'\ndef f(): raise ValueError(text)\nf()")
    assert code == 1
    assert str(RANK) not in log
    assert 'Detected at node\n  File "train.py", line 1\nwrong' in log
    _report, log, code = run(tmp_path, "def f(): raise KeyboardInterrupt\nf()")
    assert code == -2, "killed by SIGINT, as any interpreter would be"
    assert [line for line in log.splitlines() if "File" in line] == [
        f'  File "{tmp_path}/train.py", line 2, in <module>',
        f'  File "{tmp_path}/train.py", line 1, in f',
    ]


def test_a_scripts_own_excepthook_is_called(tmp_path):
    source = (
        "import sys, os, traceback\n"
        "def hook(*arguments):\n"
        "  traceback.print_exception(*arguments)\n"
        "  os._exit(9)\n"
        "sys.excepthook = hook\n"
        "1 / 0\n"
    )
    _report, log, code = run(tmp_path, source)
    assert code == 9
    assert log.endswith("ZeroDivisionError: division by zero\n")
    assert "rank.py" not in log


@pytest.mark.parametrize(
    ("text", "exit_code"), [("3", 3), ("255", 255), ("²", 1), pytest.param("9" * 5000, 1, id="long"), ("no data", 1)]
)
def test_a_forged_exit_code_does_not_end_the_launcher(text, exit_code):
    reading, writing = os.pipe()
    rank = Rank(0, 7, reading)
    os.write(writing, f"raised 1.0\tSystemExit\t{text}\ttrain.py\t1\t\n".encode())
    assert rank.read()
    assert rank.script_failure.exit_code == exit_code
    os.close(writing)
    os.close(reading)
