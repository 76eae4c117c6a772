"""What a rank's interpreter runs first: the customer's script, as `python script.py` would, and two words about it.

The launcher is told `finished` when the script's last line has returned and `raised` when an exception leaves it, both
before the interpreter shuts down: gloo may abort there although the script succeeded, and a failing rank's peers may
die before it has gone. pathlib is not used, since the script would find it imported and pay for it.
The one rule: the script cannot tell it from a plain interpreter (`__main__`, `sys.argv`, `sys.path`, tracebacks).
"""

import os
import sys
import time


def run(channel: int, script: str) -> None:
    """Run the script as `__main__`; leaves by SystemExit where the script fails."""
    os.set_inheritable(channel, False)

    def tell(word: str) -> None:
        try:
            os.write(channel, "{} {:.6f}\n".format(word, time.time()).encode())
        except OSError:  # The script closed descriptors that were not its own: the exit code must do.
            return

    sys.path[0] = os.path.dirname(script)
    module = type(sys)("__main__")
    module.__file__ = script
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    try:
        with open(script, "rb") as file:
            source = file.read()
        exec(compile(source, script, "exec"), module.__dict__)  # noqa: S102 - running the script is the purpose
    except SystemExit as leave:
        tell("finished" if leave.code in (None, 0) else "raised")
        raise
    except KeyboardInterrupt:
        tell("raised")
        raise
    except BaseException as error:  # whatever leaves the script is shown as an interpreter shows it
        tell("raised")
        # Without this frame: a traceback is to start in the script.
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(1) from None
    tell("finished")


if __name__ == "__main__":
    _channel = int(sys.argv[1])
    del sys.argv[:2]
    run(_channel, sys.argv[0])
