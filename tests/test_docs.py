"""The documentation: each block of code is read, and run or says why not; what is generated is whole; nothing is fetched."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

import ftkit
from docs import attention_table, plan_figure, recipe_keys, rooms
from ftkit.config.recipe import Recipe
from tests import docs_blocks
from tests.docs_blocks import HERE, BadBlock, blocks, check, execute, furnish, on_a_rank, pages
from tests.worlds import World

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


READ = [
    ("```python\nx = (\n```", "SyntaxError"),
    ("```bash\nftkit finetune recipe.yaml --max-restart 3\n```", "--max-restart"),
    ("```bash\nftkit train recipe.yaml\n```", "no command 'train'"),
    ("```bash\nftkit finetune recipe.yaml --set train.epoch=3\n```", "unknown key; here it is"),
    ("```bash\nftkit plan recipe.yaml --hardware 8xv100-16\n```", "8xv100-16gb"),
    ("```bash\nftkit export checkpoint-1\n```", "argument 'out'"),
    ("    ftkit reports runs/A", "no command 'reports'"),
    ("```bash\ntorchrun --nodes 2 docs/examples/ftkit_trainer.py\n```", "SystemExit"),
    ("```bash\ntorchrun --nproc-per-node 2 docs/examples/none.py\n```", "there is no docs/examples/none.py"),
    ("```bash\nsrun --ntasks 8 ftkit finetun recipe.yaml\n```", "no command 'finetun'"),
    ("```bash\nmake demos\n```", "demos"),
    ("```bash\nftkt finetune recipe.yaml\n```", "no program"),
    ("```bash\npip install -c constraint.txt .\n```", "constraint.txt"),
    ("```yaml\nmodel: {nam: folder}\n```", "nam"),
    ("<!-- run: part of a recipe -->\n```yaml\nengine: {stage: 4}\n```", "engine.stage"),
    ('```json\n{"mesages": []}\n```', "columns"),
    ('```json\n{"messages": [{"role": "user", "content": "?"}]}\n```', "no assistant turn"),
    ("```\nftkit\n```", "the fence says"),
    ("```console\nftkit\n```", "the fence says"),
    ("<!-- run: no -->\n```python\n1\n```", "no reason"),
    ("<!-- run: nope -->\n```python\n1\n```", "nothing here knows"),
    ("<!-- run: slow -->\n\nWords.\n", "before no block"),
]


@pytest.mark.parametrize("text, told", READ)
def test_a_broken_block_is_found_when_it_is_read(text: str, told: str) -> None:
    with pytest.raises(BadBlock, match=re.escape(told)):
        list(map(check, blocks("docs/page.md", text)))


RUN = [
    ("```python\na = 1\n```\n\n```python\nassert a == 2, a\n```", "docs/page.md:6: AssertionError: 1"),
    ("```python\nprint(missing)\n```", "docs/page.md:2: NameError"),
    ("```bash\nftkit recipes show no-such-recipe\n```", "ended with 2"),
    ("```bash\ncat no-such-file\n```", "no-such-file"),
]


@pytest.mark.parametrize("text, told", RUN)
def test_a_broken_block_is_found_when_it_runs(text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks("docs/page.md", text)
    list(map(check, found))
    names: dict[str, object] = {}
    with pytest.raises(BadBlock, match=re.escape(told)):
        [execute(block, tmp_path, names) for block in found]


def test_what_is_not_run_is_still_read() -> None:
    (block,) = blocks("docs/page.md", "<!-- run: no, needs eight GPUs -->\n\n    ftkit finetune recipe.yaml --no-such\n")
    assert not block.executed
    with pytest.raises(BadBlock, match="--no-such"):
        check(block)


def test_indented_blocks_and_tables_are_found_as_a_reader_sees_them() -> None:
    text = "Words.\n\n    ftkit recipes list\n    ftkit doctor\n\n| a |\n|---|\n|     b |\n\n- item\n\n    more of it\n"
    (block,) = blocks("docs/page.md", text)
    assert block.line == 3
    assert docs_blocks.lines(block.text) == ["ftkit recipes list", "ftkit doctor"]


# --- what is generated


def test_the_page_of_attention_says_what_the_plan_counts() -> None:
    assert attention_table.PAGE.read_text() == attention_table.page(), "run `make docs`"


def test_the_page_of_keys_is_that_of_the_recipe() -> None:
    assert recipe_keys.PAGE.read_text() == recipe_keys.page(), "run `make docs`"


def test_the_page_of_keys_is_complete() -> None:
    """By another way than the page is made: every key of a recipe with all sections, as it is written out."""
    rows = recipe_keys.PAGE.read_text().splitlines()
    cells = [[each.strip() for each in row.split("|")[1:-1]] for row in rows if row.startswith("| ")]
    assert all(len(row) == 4 and all(row) for row in cells)
    described = re.findall(r"^\| \[?`(\w+)`", "\n".join(rows), re.MULTILINE)
    schema = Recipe.model_json_schema()
    known = [*schema["properties"], *(name for part in schema["$defs"].values() for name in part["properties"])]
    assert sorted(described) == sorted(known)


@pytest.mark.slow
def test_the_figure_is_that_of_the_plan() -> None:
    assert plan_figure.FILE.read_text() == plan_figure.figure(), "run `make docs`"


def test_every_file_has_its_line() -> None:
    assert rooms.PAGE.read_text() == rooms.page(), "run `make docs`"


def test_every_package_is_on_the_map() -> None:
    text = (HERE / "docs" / "architecture.md").read_text()
    packages = {path.parent.relative_to(HERE) for path in (HERE / "ftkit").glob("*/**/__init__.py")}
    homes = {str(package) for package in packages if not any(other.parent == package for other in packages)}
    assert sorted(home for home in homes if f"`{home}/`" not in text) == []


def test_the_walks_name_files_that_are_there() -> None:
    text = (HERE / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:engine|hf|data|train|plan)/[\w/]+\.py)`", text))
    assert len(named) > 20
    assert sorted(name for name in named if not (HERE / "ftkit" / name).exists()) == []


def test_the_reference_has_every_public_name() -> None:
    text = (HERE / "docs" / "api.md").read_text()
    assert sorted(re.findall(r"^::: ftkit\.(\w+)$", text, re.MULTILINE)) == sorted(ftkit.__all__)


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


def build(folder: Path, source: Path = HERE) -> subprocess.CompletedProcess[str]:
    """Build the site of a copy of the repository, strictly."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    return subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_the_site_is_built_and_loads_nothing_from_outside(tmp_path: Path) -> None:
    done = build(tmp_path / "site")
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, told",
    [
        ("![A picture](https://example.org/picture.png)", "example.org"),
        ("[A page](no-such-page.md)", "no-such-page.md"),
        ("[A part](plan.md#no-such-part)", "no-such-part"),
    ],
)
def test_a_page_that_loads_from_outside_or_links_to_nothing_is_refused(words: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    settings = yaml.safe_load((HERE / "mkdocs.yml").read_text())
    settings["nav"] = ["index.md", "plan.md"]
    settings["plugins"] = [each for each in settings["plugins"] if "mkdocstrings" not in each]
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    for name in ("style.css", "plan.md"):
        shutil.copy(HERE / "docs" / name, tmp_path / "docs")
    (tmp_path / "docs" / "plan.md").write_text("# Plan\n")
    (tmp_path / "docs" / "index.md").write_text("# Title\n")
    assert build(tmp_path / "site", tmp_path).returncode == 0
    (tmp_path / "docs" / "index.md").write_text(f"# Title\n\n{words}\n")
    done = build(tmp_path / "site", tmp_path)
    assert done.returncode != 0
    assert told in done.stderr
