"""What a rank's interpreter runs first: the customer's script, as `python script.py` would, and two words about it.

The launcher is told `finished` when the script's last line has returned and `raised` when an exception leaves it, both
before the interpreter shuts down: gloo may abort there although the script succeeded, and a failing rank's peers may
die before it has gone. On a signal of the launcher's, every thread's stack goes to the same descriptor; and once the
script imports a framework, `steps` counts its steps. pathlib is not used, since the script would find it imported and
pay for it.
The one rule: the script cannot tell it from a plain interpreter (`__main__`, `sys.argv`, `sys.path`, tracebacks), and
nothing here can make it fail.
"""

import os
import sys
import time

TYPE_CHECKING = False  # as `typing` has it, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Any

STACK_SIGNAL = 50
"""A real-time signal that no library is known to use. Where nobody handles it, it kills: see `stacks`."""
_WATCHED = frozenset(
    (
        "torch.optim.optimizer",
        "torch.distributed.distributed_c10d",
        "torch.nn.parallel.distributed",
        "horovod.torch.mpi_ops",
    )
)
_STEPS = "_trainyard_steps"


def run(channel: int, script: str, record: int = -1) -> None:
    """Run the script as `__main__`; leaves by SystemExit where the script fails.

    `channel` is a pipe to the launcher, `record` the file that steps are counted in (see `steps`); -1 for none.
    """
    os.set_inheritable(channel, False)
    show_stacks(channel)
    count_steps(record)

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


def show_stacks(channel: int) -> None:
    """From now on STACK_SIGNAL makes the interpreter write where each of its threads stands."""
    try:
        import faulthandler  # noqa: PLC0415 - an interpreter may be built without it

        faulthandler.register(STACK_SIGNAL, file=channel, all_threads=True)
    except (ImportError, AttributeError, OSError, RuntimeError, ValueError):
        return


def count_steps(record: int) -> None:
    """From now on a framework that is imported (or is already: this process may be a fork) has its steps counted."""
    if record < 0:
        return
    try:
        os.set_inheritable(record, False)
        sys.meta_path.insert(0, _Onlooker(record))
        for name in _WATCHED.intersection(sys.modules):
            _imported(sys.modules[name], record)
    except Exception:  # whatever it is, it is not the script's concern
        return


class _Onlooker:
    """Stands first among the finders, finds nothing itself, and learns when a watched module has been imported."""

    def __init__(self, record: int) -> None:
        self._record = record

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name not in _WATCHED:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: "Any") -> None:
        try:
            execute = loader.exec_module

            def execute_and_tell(module: "Any") -> None:
                del loader.exec_module
                execute(module)
                _imported(module, self._record)

            # On this loader alone, and only until it has done its work.
            loader.exec_module = execute_and_tell
        except Exception:  # a loader of another kind: its steps are not counted
            return


def preload() -> None:
    """Load what counts steps now: for an interpreter that will be forked to where this folder cannot be seen."""
    _steps()


def _steps() -> "Any":
    """The module `steps`, under a name that no module of the script's can have."""
    if _STEPS not in sys.modules:
        import importlib.util  # noqa: PLC0415 - whoever imports a framework has it already; others need not pay

        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "steps.py")
        spec = importlib.util.spec_from_file_location(_STEPS, path)
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]  # there is a spec for every path
        spec.loader.exec_module(module)  # type: ignore[union-attr]  # as above
        sys.modules[_STEPS] = module
    return sys.modules[_STEPS]


def _imported(module: "Any", record: int) -> None:
    try:
        _steps().watch(module, record)
    except Exception:  # a version of the framework that we do not know: its steps are not counted
        return


if __name__ == "__main__":
    _channel, _, _record = sys.argv[1].partition(",")
    del sys.argv[:2]
    run(int(_channel), sys.argv[0], int(_record or -1))
