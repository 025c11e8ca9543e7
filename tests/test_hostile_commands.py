"""Commands with any options, environment and folders: one screen and an exit code, never a traceback, and no file harmed."""

from __future__ import annotations

import io
import json
import os
import stat
from pathlib import Path

import pytest
import yaml
from hypothesis import strategies as st

from ftkit.cli import app as cli
from ftkit.errors import UNEXPECTED, UserError
from ftkit.launch.external import outer_job
from tests.hostile import JSON, examples, fuzz
from tests.tiny import make_base, write_rows

SCREEN_LINES = 40  # what a fault of the user's may take
LONG = "é" * 5000
FOREIGN = "a user's own words\n"
NUMBERS = st.sampled_from(["0", "-1", "1", "2", "9" * 30, "1e400", "nan", "0.5", "", "x", "²", "0x10"])
NAMES = st.sampled_from(["tiny-cpu", "tiny", "nobody/nothing", "", " ", ".", "..", "~", LONG, "\udcff.yaml", "-", "a\nb"])
READ = ["recipe.yaml", "broken.yaml", "rows.jsonl", "base", "empty", "pipe", "own.html", "loop", "runs/tried", "/dev/null"]
WRITTEN = ["own.html", "folder.html", "pipe", "new/x.html", "x.yaml", "", ".", "base", "empty", "loop", LONG, "\udcff.html"]
SETTINGS = ["train.max_steps", "data.path", "model.name", "engine.stage", "memory.host_gib", "output.dir", "ranks", ""]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with a good recipe and whatever else lies about, as the current folder of these tests."""
    folder = tmp_path_factory.mktemp("place")
    base = make_base(folder / "base")
    rows = write_rows(folder / "rows.jsonl", 8)
    recipe = {
        "model": {"name": str(base)},
        "data": {"path": str(rows), "sequence_tokens": 32, "cache_dir": str(folder / "cache")},
        "train": {"batch_tokens": 128, "max_steps": 2},
        "memory": {"host_gib": 2},
        "output": {"dir": str(folder / "out")},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "broken.yaml").write_bytes(b"model: {name: \xff\n")
    (folder / "own.html").write_text(FOREIGN)
    for name in ("empty", "folder.html", "runs/tried"):
        (folder / name).mkdir(parents=True)
    (folder / "runs/tried/metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    return folder


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setattr("sys.stdin", io.StringIO())


def options(**kinds):
    """Return a strategy of some of these options, each with a value of its kind; None is a switch."""
    one = []
    for name, kind in kinds.items():
        option = f"--{name.replace('_', '-')}"
        one.append(st.just([option]) if kind is None else st.tuples(st.just(option), kind).map(list))
    return st.lists(st.one_of(one), max_size=3).map(lambda parts: [word for part in parts for word in part])


def words(*parts):
    """Return a strategy of the words of all parts, one after the other."""
    lists = [part.map(lambda found: [found] if isinstance(found, str) else found) for part in parts]
    return st.tuples(*lists).map(lambda found: [word for part in found for word in part])


READS, WRITES = st.sampled_from(READ) | NAMES, st.sampled_from(WRITTEN)
OVERRIDE = st.tuples(st.sampled_from(SETTINGS), NUMBERS | READS).map("=".join) | NUMBERS | NAMES
RECIPE = st.sampled_from(["recipe.yaml"] * 3 + READ) | NAMES
DTYPES = st.sampled_from(["fp32", "bf16", "fp8", ""])
PLAN = options(set=OVERRIDE, hardware=READS, nproc=NUMBERS, page=WRITES, json=None, largest=None, what_if=None)
FINETUNE = options(set=OVERRIDE, nproc=NUMBERS, resume=READS, max_restarts=NUMBERS)
EXPORT = options(dtype=DTYPES, max_shard_gib=NUMBERS, task=NAMES, base=READS, merge_adapter=None)
GENERATE = options(temperature=NUMBERS, top_p=NUMBERS, seed=NUMBERS)
COMMANDS = {
    "plan": words(RECIPE, PLAN),
    "data": words(RECIPE, options(set=OVERRIDE, page=WRITES, rows=NUMBERS)),
    "finetune": words(RECIPE, FINETUNE, st.just("--dry-run")),
    "export": words(READS, WRITES, EXPORT),
    "report": words(READS, st.lists(READS, max_size=2), options(out=WRITES)),
    "generate": words(READS.filter(lambda name: name != "base"), GENERATE, st.just(["--", "1+1?"])),
    "recipes show": words(READS),
    "recipes copy": words(st.just("tiny-cpu") | READS, WRITES),
}


def told(capsys, *arguments):
    """Run a command; return its exit code and what it said."""
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    said = capsys.readouterr()
    return int(caught.value.code or 0), said.out + said.err


def nothing_harmed(place):
    assert (place / "own.html").read_text() == FOREIGN
    assert stat.S_ISFIFO(os.stat(place / "pipe").st_mode)
    assert (place / "loop").is_symlink()


@examples(8, 300)
@pytest.mark.parametrize("command", COMMANDS)
def test_any_options(command, count, capsys, place):
    def check(arguments):
        code, said = told(capsys, *command.split(), *arguments)
        assert code != UNEXPECTED, said
        assert "Traceback" not in said
        assert code in (0, 1) or len(said[said.find("ftkit: ") :].splitlines()) <= SCREEN_LINES
        nothing_harmed(place)

    fuzz(count, COMMANDS[command], check)


@examples(200, 5000)
def test_any_outer_job(count):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"]
    names += ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID"]
    names += ["SLURM_LOCALID", "SLURM_JOB_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "OMP_NUM_THREADS"]
    values = NUMBERS | st.sampled_from(["2(x3),1", "gpu[03-05", "(null)", "4(x", "1"])

    def check(environ):
        try:
            joined = outer_job(environ)
        except UserError:
            return
        assert joined is None or all(isinstance(value, str) for value in joined.values())

    fuzz(count, st.dictionaries(st.sampled_from(names), values), check)


FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "model.safetensors.index.json"]
FILES += ["generation_config.json", "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"]
FILES += ["manifest.json", "metrics.jsonl", "summary.json", "recipe.yaml", "trainer_state.json"]
CONTENT = st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode(errors="replace")) | st.just(b"{}")


@examples(8, 300)
@pytest.mark.parametrize("command", ["export FOLDER new", "generate FOLDER -- hello", "report FOLDER", "finetune"])
def test_any_folder(command, count, capsys, place, tmp_path):
    places = ["recipe.yaml", f"--set=model.name={tmp_path}/{{}}", "--dry-run"] if command == "finetune" else []
    made = iter(range(10**6))

    def check(files):
        folder = tmp_path / str(next(made))
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        words = [str(folder) if word == "FOLDER" else word for word in command.split()]
        code, said = told(capsys, *words, *(each.format(folder.name) for each in places))
        assert code != UNEXPECTED, said
        assert "Traceback" not in said

    fuzz(count, st.dictionaries(st.sampled_from(FILES), CONTENT, max_size=5), check)


def test_a_fault_of_ours_is_one_line_and_a_file(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(cli, "show_recipes", lambda *_: {}["missing"])
    code, said = told(capsys, "recipes", "list")
    (report,) = tmp_path.glob("ftkit-fault-*.txt")
    assert code == UNEXPECTED
    assert "KeyError: 'missing'" in said
    assert str(report) in said
    assert "Traceback" not in said
    assert "Traceback" in report.read_text()


def test_a_fault_that_names_what_is_no_text_is_one_line_and_a_file(capsys, monkeypatch, tmp_path):
    def fails(*_):
        raise ValueError("a file called \udcff")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(cli, "show_recipes", fails)
    assert told(capsys, "recipes", "list")[0] == UNEXPECTED
    (report,) = tmp_path.glob("ftkit-fault-*.txt")
    assert "a file called \\udcff" in report.read_text()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *((name, "FTKIT_STRICT") for name in ("FTKIT_STRCT", "FTKITSTRICT", "FTKT_STRICT", "ftkit_strict")),
        ("FTKIT_THREADS", "OMP_NUM_THREADS"),
    ],
)
def test_a_variable_that_nobody_reads_is_named(name, meant, capsys, monkeypatch):
    monkeypatch.setenv(name, "1")
    code, said = told(capsys, "recipes", "list")
    assert code == 2
    assert f"the environment has {name}, which is not read; did you mean {meant}?" in " ".join(said.split())
    monkeypatch.delenv(name)
    monkeypatch.setenv("FTKIT_RUNS", "1")  # a user's own
    assert told(capsys, "recipes", "list")[0] == 0


def test_a_full_drive_is_said(capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "out.html")

    monkeypatch.setattr(cli, "show_recipes", full)
    code, said = told(capsys, "recipes", "list")
    assert code == 2
    assert "out.html: No space left on device" in said
    assert Path.cwd().exists()
