"""Two boxes under torchrun, and a wheel in an environment of its own; both start everything anew and are slow."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.tiny import make_base, write_rows

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[1]
PORT = 29571


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("boxes")
    make_base(folder / "base")
    write_rows(folder / "rows.jsonl", 50)
    facts = {
        "model": {"name": str(folder / "base")},
        "data": {"path": str(folder / "rows.jsonl"), "sequence_tokens": 32, "cache_dir": str(folder / "cache")},
        "eval": {"share": 0.2},
        "train": {"batch_tokens": 192, "max_steps": 6},
        "optimizer": {"lr": 0.01, "warmup_steps": 2},
        "output": {"dir": str(folder / "out")},
    }
    (folder / "recipe.yaml").write_text(json.dumps(facts))  # JSON is YAML
    return folder


def losses(folder):
    told = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [[line["loss"], line["grad_norm"], line["learning_rate"]] for line in told if "loss" in line]


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    return done.returncode == 0


@pytest.fixture
def two_hosts():
    """Two network namespaces with a cable between them: their names, the addresses on it and the interfaces."""
    names = [f"ftkit-{os.getpid()}-{side}" for side in "ab"]
    cable = [f"ft{os.getpid() % 10**6}{side}" for side in "ab"]
    addresses = ["10.77.123.1", "10.77.123.2"]
    try:
        if not (shutil.which("ip") and all(ip("netns", "add", name) for name in names)):
            pytest.skip("network namespaces cannot be made here")
        assert ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for name, interface, address in zip(names, cable, addresses):
            assert ip("link", "set", interface, "netns", name)
            assert ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
            assert ip("-n", name, "link", "set", interface, "up")
            assert ip("-n", name, "link", "set", "lo", "up")
        yield list(zip(names, cable, addresses))
    finally:
        for name in names:
            ip("netns", "delete", name)


def test_two_hosts_train_as_one_does(home, two_hosts):
    command = [str(Path(sys.executable).with_name("ftkit")), "finetune", str(home / "recipe.yaml")]
    one = subprocess.run([*command, "--nproc", "2"], capture_output=True, text=True, check=False)
    assert one.returncode == 0, one.stderr
    processes = []
    for number, (name, interface, _) in enumerate(two_hosts):
        torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nnodes", "2", "--nproc-per-node", "1"]
        meeting = ["--node-rank", str(number), "--master-addr", two_hosts[0][2], "--master-port", str(PORT)]
        ours = ["--no-python", *command, "--set", f"output.dir={home / 'two'}"]
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
        started = ["ip", "netns", "exec", name, *torchrun, *meeting, *ours]
        processes.append(subprocess.Popen(started, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    told = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(told)
    assert json.loads((home / "two" / "summary.json").read_text())["world_size"] == 2
    for mine, other in zip(losses(home / "two"), losses(home / "out"), strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


def test_a_wheel_runs_outside_the_repository(tmp_path):
    copy = tmp_path / "source"
    dropped = shutil.ignore_patterns(".git", ".venv*", "runs", "build", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(REPOSITORY, copy, ignore=dropped)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheels = tmp_path / "wheels"
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(wheels), str(copy)]
    subprocess.run([*pip, *build], check=True, capture_output=True)
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    (wheel,) = wheels.iterdir()
    python = home / "bin" / "python"
    subprocess.run(
        [*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True
    )
    # What it depends on is borrowed: the tests have no network. Paths in a .pth file are not searched for .pth files,
    # so the editable installation of the repository stays behind.
    site = next((home / "lib").glob("python*/site-packages"))
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    listed = subprocess.run([home / "bin" / "ftkit", "recipes", "list"], cwd=tmp_path, capture_output=True, text=True)
    assert "tiny-cpu" in listed.stdout
    where = subprocess.run(
        [python, "-c", "import ftkit; print(ftkit.__file__)"], cwd=tmp_path, capture_output=True, text=True
    )
    assert where.stdout.startswith(str(home))
    short = ["train.max_steps=2", "eval.max_rows=4", "show.count=1", f"data.cache_dir={tmp_path / 'cache'}"]
    settings = [word for setting in short for word in ("--set", setting)]
    command = [home / "bin" / "ftkit", "finetune", "tiny-cpu", *settings]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())
    assert (summary["world_size"], summary["steps"]) == (2, 2)
