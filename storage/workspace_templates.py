"""The examples in the folder `examples/`, which a new workspace can contain."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from django.conf import settings
from django.utils.translation import gettext_lazy as _

from console.core.errors import InvalidInput
from storage.catalog import Fill
from storage.files import FILE_MODE, SpaceCounter
from storage.trees import Usage


@dataclass(frozen=True)
class Template:
    """An example, which is one script. `title` is the first line of its docstring."""

    name: str
    title: str
    content: bytes


@cache
def templates() -> dict[str, Template]:
    """Return the examples by name. They are part of the installation and never change while it runs."""
    templates_by_name = {}
    for path in sorted((settings.BASE_DIR / "examples").glob("*.py")):
        content = path.read_bytes()
        title = (ast.get_docstring(ast.parse(content)) or path.stem).partition("\n")[0]
        templates_by_name[path.stem] = Template(path.stem, title, content)
    return templates_by_name


def template_fill(name: str) -> Fill:
    """Return a function that fills a new workspace with an example. Raises InvalidInput for the field `template`."""
    template = templates().get(name)
    if template is None:
        raise InvalidInput(fields={"template": _("There is no such example. Choose one of the list.")})

    def fill(folder: Path, counter: SpaceCounter) -> Usage:
        counter.count(size_bytes=len(template.content), entries=1)
        script = folder / f"{template.name}.py"
        script.write_bytes(template.content)
        script.chmod(FILE_MODE)
        return Usage(len(template.content), 2)  # the script, and the workspace's folder, as `Fill` requires

    return fill
