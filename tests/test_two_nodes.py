"""Two nodes under torchrun train as one node does. The nodes are network namespaces of this machine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import make_base, write_rows
from tests.worlds import PATIENCE, free_port


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
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
    records = [json.loads(record) for record in (folder / "metrics.jsonl").read_text().splitlines()]
    return [[each["loss"], each["grad_norm"], each["learning_rate"]] for each in records if "loss" in each]


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False, timeout=30 * PATIENCE)
    return done.returncode == 0


@pytest.fixture
def two_nodes():
    """Two connected network namespaces: their names, interfaces and addresses."""
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


@pytest.mark.slow
def test_two_nodes_train_as_one_does(home, two_nodes):
    command = [str(Path(sys.executable).with_name("ftkit")), "finetune", str(home / "recipe.yaml")]
    limit, port = 200 * PATIENCE, free_port()
    one = subprocess.run([*command, "--nproc", "2"], capture_output=True, text=True, check=False, timeout=limit)
    assert one.returncode == 0, one.stderr
    processes = []
    for number, (name, interface, _) in enumerate(two_nodes):
        torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nnodes", "2", "--nproc-per-node", "1"]
        meeting = ["--node-rank", str(number), "--master-addr", two_nodes[0][2], "--master-port", str(port)]
        ours = ["--no-python", *command, "--set", f"output.dir={home / 'two'}"]
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
        started = ["ip", "netns", "exec", name, *torchrun, *meeting, *ours]
        processes.append(subprocess.Popen(started, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        printed = [process.communicate(timeout=limit)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)
    assert json.loads((home / "two" / "summary.json").read_text())["world_size"] == 2
    for mine, other in zip(losses(home / "two"), losses(home / "out"), strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
