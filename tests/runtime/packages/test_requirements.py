"""Requirements files: normalized lines, refused lines, and conflicts with the image."""

import pytest

from runtime.packages import requirements
from runtime.packages.requirements import Conflict, InvalidRequirements, Problem


def test_requirements_are_normalized():
    lines = ["NumPy >= 1.2 # why", "", "einops", "einops", "torch[x]==4.*; python_version > '3.8'", "ujson \\", "  >5"]
    assert requirements.parse("\ufeff# comment\r\n" + "\n".join(lines)) == (
        "NumPy>=1.2",
        "einops",
        'torch[x]==4.*; python_version > "3.8"',
        "ujson>5",
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("-e .", Problem.OPTION),
        ("--index-url https://evil.example/simple", Problem.PLACE),  # an option, but the place is what matters
        ("einops==1.0 --hash=sha256:00", Problem.OPTION),
        ("einops \\\n --global-option=x", Problem.OPTION),
        ("./package", Problem.PLACE),
        ("/etc/passwd", Problem.PLACE),
        ("~/package", Problem.PLACE),
        ("FILE:///etc", Problem.PLACE),
        ("package @ file:///etc", Problem.PLACE),
        ("package @ git+ssh://evil.example/package", Problem.PLACE),
        ("git+https://evil.example/package", Problem.PLACE),
        ("package.whl/other", Problem.SYNTAX),
        ("package==", Problem.SYNTAX),
        ("two packages", Problem.SYNTAX),
        ("${HOME}", Problem.SYNTAX),
    ],
)
def test_options_paths_and_invalid_lines_are_refused_with_their_number(line, problem):
    with pytest.raises(InvalidRequirements) as refused:
        requirements.parse(f"einops\n\n{line}\n")
    assert (refused.value.problem, refused.value.line) == (problem, 3)


def test_files_without_requirements_or_with_too_many_are_refused():
    too_many = "".join(f"a{number}\n" for number in range(requirements.MAX_REQUIREMENTS + 1))
    texts = {Problem.EMPTY: "# nothing\n", Problem.TOO_LARGE: "einops\n" * 10_000, Problem.TOO_MANY: too_many}
    for problem, text in texts.items():
        with pytest.raises(InvalidRequirements, match=f"^{problem}$"):
            requirements.parse(text)


def test_a_requirement_for_another_version_than_the_installed_one_is_a_conflict():
    installed = {"torch": "2.13.0+cpu", "typing-extensions": "4.16.0"}
    assert requirements.find_conflict(["Torch>=2", "typing_extensions", "torch==2.13.0"], installed) is None
    assert requirements.find_conflict(["einops", "torch==2.1"], installed) == Conflict(
        "torch==2.1", "torch", "2.13.0+cpu"
    )
    of_windows = 'torch==2.1; sys_platform == "win32"'  # does not apply to images, which are Linux
    assert requirements.find_conflict([of_windows], installed) is None
