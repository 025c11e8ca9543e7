"""The files of recipes: given by path or packaged name, and the files that they extend.

The key `extends` at the top of a recipe names another recipe. The keys of the file are laid over the keys of that one, which
may extend a third. The recipe is checked after that, so that a file may leave out what its base has.
"""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from ftkit.config.errors import RecipeError
from ftkit.config.wording import brief, did_you_mean
from ftkit.config.yaml_lines import Document, Problem, lay_over, read

EXTENDS = "extends"


def packaged() -> dict[str, Path]:
    """Return the packaged recipes: name to file, sorted."""
    folder = Path(str(resources.files("ftkit.recipes")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find(path_or_name: str, folder: Path = Path()) -> Path:
    """Return the file of a recipe given by packaged name or by path, relative to a folder, or raise RecipeError."""
    path, known = folder / os.path.expanduser(path_or_name), packaged()
    name = path_or_name.removesuffix(".yaml")
    if path.is_file():
        return path
    if name in known:
        return known[name]
    hint = did_you_mean(name, list(known))
    message = f"no such file, and no packaged recipe of that name{hint}; `ftkit recipes list` shows them"
    raise RecipeError([Problem(str(path), "", message)])


def read_file(path_or_name: str, folder: Path = Path()) -> tuple[Path, str]:
    """Return the file of a recipe, as `find` does, and its text."""
    path = find(path_or_name, folder)
    try:
        return path, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError([Problem(path_or_name, "", f"not readable: {error}")]) from None


def resolve(text: str, source: str, path: Path | None = None) -> Document:
    """Read the text of a recipe over the recipes that it extends. Errors are in the document's `problems`.

    Args:
        text: YAML.
        source: Name of the file in messages.
        path: The file; `extends` is relative to its folder. Default: `source`.

    Returns:
        The keys of all files, without `extends`. If a base cannot be read, `readable` is false.
    """
    return _over_its_base(read(text, source), path or Path(source), {})


def _over_its_base(document: Document, path: Path, above: dict[Path, str]) -> Document:
    """Lay a document over its base. `above` has the files that extend this one, with their names in messages."""
    name = document.values.pop(EXTENDS, None)
    if name is None:
        return document
    chain = {**above, path.resolve(): document.source}
    try:
        if not isinstance(name, str):
            raise ValueError(f"found {brief(name)}, needs the path of one file, or the name of a packaged recipe")
        base, text = read_file(name, path.parent)
        source = base.stem if base in packaged().values() else str(base)
        if base.resolve() in chain:
            raise ValueError(f"{' -> '.join([*chain.values(), source])} is a cycle; remove one `extends`")
    except (RecipeError, ValueError) as error:
        message = str(error.problems[0] if isinstance(error, RecipeError) else error)
        document.problems.append(Problem(document.place((EXTENDS,)), EXTENDS, message))
        document.readable = False
        return document
    return lay_over(document, _over_its_base(read(text, source), base, chain))
