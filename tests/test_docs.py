"""The documentation: each block of code is read, and run or says why not; what is generated is whole; nothing is fetched."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from contextlib import suppress
from html.parser import HTMLParser
from itertools import product
from pathlib import Path

import pytest

import ftkit
from benchmarks import published
from docs import cli_reference, convergence_figure, models_table, plan_figure, recipe_keys
from ftkit.cli.app import main
from ftkit.plan.catalog import architectures
from tests.docs_blocks import HERE, BadBlock, blocks, check, execute, furnish, on_a_rank, pages
from tests.worlds import PATIENCE, World

ALL = {page: blocks(page) for page in pages()}
QUICK = [page for page, found in ALL.items() if any(each.executed and not each.run.slow for each in found)]
SLOW = [page for page, found in ALL.items() if any(each.executed and each.run.slow for each in found)]


@pytest.mark.parametrize("page", ALL)
def test_every_block_is_what_it_says(page: str) -> None:
    for block in ALL[page]:
        check(block)


def run_page(page: str, folder: Path, world: World | None, *, slow: bool) -> None:
    """Run the blocks of a page in their order; those marked slow only if asked."""
    names: dict[str, object] = {}
    for block in ALL[page]:
        if not block.executed or (block.run.slow and not slow):
            continue
        if block.run.ranks > 1:
            assert world is not None, f"{block.page}:{block.line}: a block for several ranks is to be marked slow"
            assert world.size == block.run.ranks
            world.run(on_a_rank, block, str(folder))
        else:
            execute(block, folder, names)


@pytest.mark.parametrize("page", QUICK)
def test_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(furnish(tmp_path))
    run_page(page, tmp_path, None, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW)
def test_all_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world2: World) -> None:
    monkeypatch.chdir(furnish(tmp_path))
    run_page(page, tmp_path, world2, slow=True)


RUN = [
    ("```python\nprint(missing)\n```", "docs/page.md:2: NameError"),
    ("```bash\nftkit recipes show no-such-recipe\n```", "ended with 2"),
]


@pytest.mark.parametrize("text, told", RUN)
def test_a_broken_block_is_found_when_it_runs(text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks("docs/page.md", text)
    list(map(check, found))
    names: dict[str, object] = {}
    with pytest.raises(BadBlock, match=re.escape(told)):
        [execute(block, tmp_path, names) for block in found]


# --- what is generated


def test_the_page_of_published_results_says_what_the_models_say() -> None:
    page = published.PAGE.read_text(encoding="utf-8")
    assert published.generated(page, "published") == published.fragment(), "run `make published`"
    assert all(each.holds for each in published.compare() if each.role == "held back"), (
        "docs/benchmarks.md says that they hold"
    )


def test_the_page_of_keys_is_that_of_the_recipe() -> None:
    assert recipe_keys.PAGE.read_text() == recipe_keys.page(), "run `make docs`"


def test_the_page_of_commands_is_that_of_the_app() -> None:
    assert cli_reference.PAGE.read_text() == cli_reference.page(), "run `make docs`"


def test_the_models_by_card_are_those_of_the_plan() -> None:
    text = models_table.PAGE.read_text()
    cells = models_table.cells(text)
    known = list(product(architectures(), models_table.METHODS))
    assert set(known) <= set(cells)
    hardware, draw = [*models_table.HARDWARE], random.Random(3)
    asked = [(*draw.choice(known), name) for name in hardware]
    for model, method, name in [*asked, ("meta-llama/Llama-2-13b-hf", "full", "1xv100-32gb")]:
        found = cells[model, method][hardware.index(name)]
        assert found == models_table.cell(model, method, name), "run `make recipes`"
    assert cells["meta-llama/Llama-2-13b-hf", "full"][hardware.index("1xv100-32gb")] == "no"
    assert text.startswith(models_table.HEAD)


def test_the_readme_has_the_models_of_the_page() -> None:
    text = models_table.README.read_text()
    assert text == models_table.readme(text), "run `make recipes`"


@pytest.mark.slow
def test_the_readme_shows_the_output_of_its_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    command = next(each.text for each in ALL["README.md"] if each.text.startswith("ftkit plan"))
    shown = next(each.text for each in ALL["README.md"] if each.language == "text")
    with suppress(SystemExit):
        main(command.split()[1:])
    said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert shown.splitlines() == said, f"write the output of `{command.strip()}` into README.md"


@pytest.mark.slow
def test_the_figure_is_that_of_the_plan() -> None:
    assert plan_figure.FILE.read_text() == plan_figure.figure(), "run `make docs`"


def test_the_curves_are_those_of_the_result() -> None:
    for path, text in convergence_figure.figures().items():
        assert path.read_text() == text, "run `make docs`"


def test_every_package_is_on_the_map() -> None:
    text = (HERE / "docs" / "architecture.md").read_text()
    packages = {path.parent.name for path in (HERE / "ftkit").glob("*/__init__.py")}
    assert sorted(package for package in packages if f"`{package}/`" not in text) == []


def test_the_walks_name_files_that_are_there() -> None:
    text = (HERE / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:engine|hf|data|train|plan)/[\w/]+\.py)`", text))
    assert len(named) > 20
    assert sorted(name for name in named if not (HERE / "ftkit" / name).exists()) == []


def test_the_reference_has_every_public_name() -> None:
    text = (HERE / "docs" / "api.md").read_text()
    names = [name for name in ftkit.__all__ if name != "notebook"]  # its class has an entry of its own
    assert sorted(re.findall(r"^::: ftkit\.(\w+)$", text, re.MULTILINE)) == sorted(names)


# --- the site


class Resources(HTMLParser):
    """Collects what a page loads by itself: scripts, styles, pictures, frames. Links that a reader follows are not meant."""

    LOADED = ("script", "img", "source", "iframe", "audio", "video", "embed")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        told = dict(attributes)
        if tag in self.LOADED or (tag == "link" and told.get("rel") != "canonical"):
            self.found += [told[name] or "" for name in ("src", "href", "srcset") if name in told]


@pytest.mark.slow
def test_the_site_is_built_and_loads_nothing_from_outside(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=120 * PATIENCE)
    assert done.returncode == 0, done.stderr
    made = sorted((tmp_path / "site").rglob("*.html"))
    assert len(made) >= len([page for page in ALL if page.startswith("docs/")])
    for path in made:
        resources = Resources()
        resources.feed(path.read_text())
        assert resources.found
        outside = [each for each in resources.found if re.match(r"(\w+:)?//", each)]
        assert not outside, (path.name, outside)
        assert 'class="mermaid"' not in path.read_text()  # its script would be fetched
    for path in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(\w+:)?//", path.read_text()), path
