"""The first module that a rank's interpreter runs: it runs the customer's script, as `python script.py` would.

When the script's last line has returned, this module reports `finished` to the launcher. When an exception leaves the
script, it reports `raised`, with the exception and its place. Then it shows the exception with the customer's frames
only. Both reports precede the interpreter's shutdown, for two reasons: gloo may abort during the shutdown although the
script succeeded, and the peers of a failing rank may fail before that rank has ended.

On STACK_SIGNAL from the launcher, the stacks of all threads are written to the pipe of these reports. When the script
imports a framework, `step_timer` begins to count its steps.

A script cannot distinguish this from a plain interpreter (`__main__`, `sys.argv`, `sys.path`, tracebacks), and nothing
here can make it fail. Few modules are imported, since the script would find them in `sys.modules`. Annotations are
quoted, because the names in them are imported for type checkers only. The interpreter is the image's: Python 3.8 or
later.
"""

import os
import sys
import time

TYPE_CHECKING = False  # type checkers take it for True; `typing` would take time to import
if TYPE_CHECKING:
    from typing import Any, List, Tuple

PLATFORM_FILE_NAME = "<trainyard>"
"""The file name under which `step_timer` is compiled, and in a warm start this module. Customers see it in tracebacks
from which the platform's frames cannot be removed."""
IMAGE_LINKS = "/opt/trainyard/images"
"""The folder of links to the image and its interpreter, in a sandbox. Elsewhere there is none."""
_FOLDER = os.path.dirname(os.path.abspath(__file__))
# The files whose frames are the platform's, not the customer's.
_PLATFORM_FILES = (os.path.join(_FOLDER, "rank.py"), os.path.join(_FOLDER, "warm", "forkserver.py"))
_MAX_REPORT_BYTES = 4000
"""Maximum bytes of a report. A write of up to 4096 bytes to a pipe is atomic, so stacks cannot be mixed into it."""
_MAX_TEXT_BYTES = 400
"""How much of the beginning of an exception's text is reported: a few lines. With the other limits, a report has at
most `_MAX_REPORT_BYTES`."""
_MAX_TEXT_END_BYTES = 200
"""How much of the end of a longer text is reported in addition, since some libraries put the reason there."""
_MAX_NAME_BYTES = 120
"""Maximum length of the name of a type, file or function; real names are shorter, and longer ones are cut."""
_MAX_CHAIN_LENGTH = 4
"""Maximum number of exceptions of a chain that are reported: the first ones and the last."""
STACK_SIGNAL = 50
"""A real-time signal that no known library uses. A process that does not handle it is killed: see `telemetry.stacks`.
"""
# Modules whose import starts the counting of steps; `step_timer` has a function for each.
_COUNTED_MODULES = frozenset(
    (
        "torch.optim.optimizer",
        "torch.distributed.distributed_c10d",
        "torch.nn.parallel.distributed",
        "horovod.torch.mpi_ops",
    )
)
_STEP_TIMER_MODULE = "_trainyard_steps"
"""The name of `step_timer` in `sys.modules`, which no module of a script has."""


def run(report_fd: int, script: str, counts_fd: int = -1) -> None:
    """Run the script as `__main__`; raises SystemExit if the script fails.

    `report_fd` is the pipe to the launcher, `counts_fd` the file of `step_timer` (-1: none).
    """
    os.set_inheritable(report_fd, False)  # processes that the script starts must not report
    show_stacks(report_fd)
    count_steps(counts_fd)

    def report(kind: str, fields: str = "") -> None:
        line = "{} {:.6f}{}".format(kind, time.time(), fields)
        try:
            os.write(report_fd, line.encode("utf-8", "replace")[:_MAX_REPORT_BYTES] + b"\n")
        except OSError:  # the script has closed the pipe, so the launcher knows only the exit code
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
    except SystemExit as exit_request:
        if exit_request.code in (None, 0):
            report("finished")
        else:
            report("raised", _describe_exception(exit_request))
        raise
    except KeyboardInterrupt:
        report("raised")  # without fields, because the launcher reports SIGINT, by which the process will end
        # Raised again, since only the interpreter ends by SIGINT, after it has shown the exception and shut down.
        sys.excepthook = _Excepthook(sys.excepthook)
        raise
    except BaseException as error:  # anything that leaves the script is shown as an interpreter shows it
        report("raised", _describe_exception(error))
        _Excepthook(sys.excepthook)(type(error), error, None)  # it takes the traceback from `error`
        raise SystemExit(1) from None
    report("finished")


def _describe_exception(error: BaseException) -> str:
    """Return the fields of the report `raised` about an exception, each after a tab.

    The fields are its type, the most informative line of its text, and the file, line and function of the customer's
    innermost frame. Then follow the type and text of each exception in its chain, beginning with this exception. For a
    SystemExit the text is the exit code.
    """
    try:
        text = _text(error)
        if isinstance(error, SystemExit):
            text = str(error.code & 255 if isinstance(error.code, int) else 1)  # the exit code that a parent sees
        elif isinstance(error, SyntaxError):
            text = str(error.msg)  # its place is reported separately
        fields = [_type_name(error), _shorten(_most_informative_line(text), _MAX_TEXT_BYTES), *_find_place(error)]
        chain = _chain(error)
        if len(chain) > _MAX_CHAIN_LENGTH:
            chain = [*chain[: _MAX_CHAIN_LENGTH - 1], chain[-1]]
        for chained in chain:
            fields += [_type_name(chained), _shorten(_text(chained), _MAX_TEXT_BYTES, _MAX_TEXT_END_BYTES)]
        return "".join("\t" + " ".join(field.split()) for field in fields)
    except BaseException:  # the methods of a customer's exception may raise anything
        return ""


def _most_informative_line(text: str) -> str:
    """Return the most informative line of an exception's text: the first that does not only introduce other lines.

    Such an introduction ends with a colon, such as "Error(s) in loading state_dict:". After TensorFlow's "in user
    code:" come frames, each a line `File …` and a line of source, and then the error itself.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or not lines[0].endswith(":"):
        return lines[0] if lines else ""
    if any(line.endswith("Traceback (most recent call last):") for line in lines):
        return lines[-1]  # a traceback ends with its exception
    frames = [number for number, line in enumerate(lines) if line.startswith('File "')]
    if frames:
        return (lines[frames[-1] + 2 :] or lines[-1:])[0]
    return next((line for line in lines if not line.endswith(":")), lines[0])


def _type_name(error: BaseException) -> str:
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else kind.__module__ + "."
    return _shorten(module + kind.__qualname__, _MAX_NAME_BYTES)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an exception without a text; the interpreter shows it without one
        return ""


def _shorten(text: str, start_bytes: int, end_bytes: int = 0) -> str:
    """Return the text. If it is longer than both together, return its first `start_bytes` and last `end_bytes`."""
    data = text.encode("utf-8", "replace")
    if len(data) <= start_bytes + end_bytes:
        return data.decode()
    return (data[:start_bytes] + b" " + data[len(data) - end_bytes :]).decode("utf-8", "ignore")


def _find_place(error: BaseException) -> "List[str]":
    """Return the file, line and function of the innermost frame that is neither the platform's nor a library's.

    Of a SyntaxError in the customer's code, return the error's file and line: the code did not run, so no frame shows
    them. If the error is in a text that the code parses, such as a template (no `.py` file), the frame counts.
    """
    place = ["", "", ""]
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if _is_customer_file(file):
            name = trace.tb_frame.f_code.co_name
            place = [os.path.basename(file), str(trace.tb_lineno), "" if name == "<module>" else name]
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.filename:
        file = error.filename
        if place[0] == "" or (file.endswith(".py") and _is_customer_file(file)):
            place = [os.path.basename(file), str(error.lineno or ""), ""]
    return [_shorten(part, _MAX_NAME_BYTES) for part in place]


def _is_customer_file(file: str) -> bool:
    """Return whether code of this file name is neither the platform's nor a library's, nor a string's (`<string>`)."""
    is_library = "/site-packages/" in file or "/dist-packages/" in file or "/lib/python" in file
    return not (is_library or file.startswith("<") or _is_platform_file(file))


def _chain(error: BaseException) -> "List[BaseException]":
    """Return an exception, its causes and contexts, and the members of exception groups; the outermost first."""
    chain: "List[BaseException]" = []
    seen_ids = set()
    pending: "List[Any]" = [error]
    while pending:
        chained = pending.pop(0)
        if not isinstance(chained, BaseException) or id(chained) in seen_ids:
            continue
        seen_ids.add(id(chained))
        chain.append(chained)
        pending.append(chained.__cause__)
        if not chained.__suppress_context__:
            pending.append(chained.__context__)
        group = getattr(chained, "exceptions", ())
        pending.extend(group if isinstance(group, tuple) else ())
    return chain


def _is_platform_file(file: str) -> bool:
    return file == PLATFORM_FILE_NAME or file in _PLATFORM_FILES


class _Excepthook:
    """Shows an exception through `hook`, without the platform's frames. The host's paths are replaced by the run's."""

    def __init__(self, hook: "Any") -> None:
        self._hook = hook

    def __call__(self, kind: "Any", error: BaseException, trace: "Any") -> None:
        for chained in _chain(error):
            chained.__traceback__ = _remove_platform_frames(chained.__traceback__)
        stderr = sys.stderr
        if stderr is not None:
            sys.stderr = _Stderr(stderr, find_displayed_paths())
        try:
            self._hook(kind, error, error.__traceback__)
        finally:
            sys.stderr = stderr


class _Stderr:
    """Standard error that removes the platform's frames from the text written to it, and replaces the host's paths.

    TensorFlow, for example, puts a traceback into the text of its exceptions.
    """

    def __init__(self, stderr: "Any", paths: "List[Tuple[str, str]]") -> None:
        self._stderr = stderr
        self._paths = paths

    def write(self, text: str) -> "Any":
        return self._stderr.write(replace_paths(_remove_platform_lines(text), self._paths))

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._stderr, name)


def _remove_platform_frames(trace: "Any") -> "Any":
    """Return the traceback without the platform's frames, which call the script or belong to `step_timer`."""
    while trace is not None and _is_platform_file(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    entry = trace
    while entry is not None and entry.tb_next is not None:
        if _is_platform_file(entry.tb_next.tb_frame.f_code.co_filename):
            entry.tb_next = entry.tb_next.tb_next
        else:
            entry = entry.tb_next
    return trace


def _remove_platform_lines(text: str) -> str:
    """Return the text without the platform's frames: their lines `File …` and the lines of source below these."""
    platform_frames = ['File "{}"'.format(file) for file in (PLATFORM_FILE_NAME, *_PLATFORM_FILES)]
    if not any(frame in text for frame in platform_frames):
        return text
    remaining = []
    frame_indent = -1  # of the platform's frame whose source lines follow; -1: none
    is_after_frame = False
    for line in text.splitlines(True):
        content = line.lstrip()
        indent = len(line) - len(content)
        is_frame = content.startswith(tuple(platform_frames))
        # Source lines are indented more than their frame. TensorFlow prints an empty line for one that it cannot read.
        is_below_frame = frame_indent >= 0 and indent > frame_indent
        is_source = is_below_frame if content else is_after_frame
        if is_frame:
            frame_indent = indent
        elif not is_source:
            frame_indent = -1
            remaining.append(line)
        is_after_frame = is_frame
    return "".join(remaining)


def find_displayed_paths() -> "List[Tuple[str, str]]":
    """Return pairs of a path of the host and the link in IMAGE_LINKS that customers see in place of the path."""
    try:
        with os.scandir(IMAGE_LINKS) as entries:
            links = [entry.path for entry in entries if entry.is_symlink()]
        # A folder comes after the paths inside it, because `replace_paths` replaces paths in this order.
        return sorted(((os.readlink(link), link) for link in links), reverse=True)
    except OSError:
        return []


def replace_paths(text: str, paths: "List[Tuple[str, str]]") -> str:
    """Return the text with the paths of `find_displayed_paths` replaced."""
    for path, link in paths:
        text = text.replace(path + "/", link + "/")
    return text


def show_stacks(report_fd: int) -> None:
    """Write the stacks of all threads to the pipe `report_fd` on STACK_SIGNAL."""
    try:
        import faulthandler  # noqa: PLC0415 - an interpreter may be built without it

        faulthandler.register(STACK_SIGNAL, file=report_fd, all_threads=True)
    except (ImportError, AttributeError, OSError, RuntimeError, ValueError):
        return  # the launcher then sees that this process does not handle the signal, and does not send it


def count_steps(counts_fd: int) -> None:
    """Count a framework's steps once the script imports it, or now if it is imported already, as in a forked rank."""
    if counts_fd < 0:
        return
    try:
        os.set_inheritable(counts_fd, False)
        sys.meta_path.insert(0, _ImportObserver(counts_fd))
        for name in _COUNTED_MODULES.intersection(sys.modules):
            _count_steps_of(sys.modules[name], counts_fd)
    except Exception:  # an error here must not reach the script
        return


class _ImportObserver:
    """The first import finder. It delegates to the others, and starts the counting once a module is imported."""

    def __init__(self, counts_fd: int) -> None:
        self._counts_fd = counts_fd

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name not in _COUNTED_MODULES:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                self._observe(spec.loader)
                return spec
        return None

    def _observe(self, loader: "Any") -> None:
        """Have the loader start the counting after it has executed its module."""
        try:
            execute = loader.exec_module

            def execute_and_count(module: "Any") -> None:
                del loader.exec_module
                execute(module)
                _count_steps_of(module, self._counts_fd)

            # Set only on this loader of one module, and removed when it is called.
            loader.exec_module = execute_and_count
        except Exception:  # a loader of another kind: its steps are not counted
            return


def preload() -> None:
    """Load `step_timer` now, because a forked rank cannot see this folder from inside its sandbox."""
    _load_step_timer()


def _load_step_timer() -> "Any":
    """Return the module `step_timer`, loaded under a name that no module of the script can have."""
    if _STEP_TIMER_MODULE not in sys.modules:
        path = os.path.join(_FOLDER, "step_timer.py")
        with open(path, "rb") as file:
            source = file.read()
        module = type(sys)(_STEP_TIMER_MODULE)
        exec(compile(source, PLATFORM_FILE_NAME, "exec"), module.__dict__)  # noqa: S102 - the platform's code
        sys.modules[_STEP_TIMER_MODULE] = module
    return sys.modules[_STEP_TIMER_MODULE]


def _count_steps_of(module: "Any", counts_fd: int) -> None:
    try:
        _load_step_timer().watch(module, counts_fd)
    except Exception:  # an unknown version of the framework: its steps are not counted
        return


if __name__ == "__main__":
    _report_fd, _, _counts_fd = sys.argv[1].partition(",")
    del sys.argv[:2]
    run(int(_report_fd), sys.argv[0], int(_counts_fd or -1))
