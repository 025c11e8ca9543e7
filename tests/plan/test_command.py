"""`ftkit plan` and what a run does with its plan: the big models on their node, JSON, and errors of one screen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftkit.cli import app as cli
from ftkit.plan.catalog import find_hardware
from ftkit.plan.memory import GIB

RECIPES = Path(__file__).parent / "recipes"
PARAMETERS = {"llama2-13b": 13_015_864_320, "qwen25-14b": 14_770_033_664, "gpt-15b": 15_917_875_200}


def leave(*arguments):
    """Run a command in this process; returns its exit code."""
    with pytest.raises(SystemExit) as caught:
        cli.main([str(argument) for argument in arguments])
    return caught.value.code or 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["llama2-13b", "qwen25-14b", pytest.param("gpt-15b", marks=pytest.mark.slow)])
def test_full_parameter_training_fits_eight_small_cards_and_330_gb(name, capsys):
    """Issue 3, done when 7."""
    assert leave("plan", RECIPES / f"{name}.yaml", "--hardware", "8xv100-16gb", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    known = find_hardware("8xv100-16gb")
    assert plan["model"]["trained"] == plan["model"]["parameters"] == PARAMETERS[name]
    assert plan["strategy"]["stage"] == 3
    assert plan["strategy"]["state"] == "host"
    assert plan["tiers"]["device"]["needed_bytes"] <= known.device_bytes < 16 * GIB
    assert plan["tiers"]["host"]["needed_bytes"] <= known.host_bytes < 330e9
    assert "nvme" not in plan["tiers"]
    assert plan["largest_micro_batch"] >= plan["strategy"]["micro_batch"] >= 1
    assert plan["why"]
    for tier in plan["tiers"].values():
        assert sum(tier["purposes"].values()) == tier["needed_bytes"] == max(tier["phases"].values())


def refusal(capsys, *arguments):
    code = leave(*arguments)
    said = capsys.readouterr()
    text = " ".join((said.out + said.err).split())
    assert code == 2, text
    assert "Traceback" not in text
    return text


def test_refusals_are_one_screen(capsys):
    recipe = RECIPES / "llama2-13b.yaml"
    text = refusal(capsys, "plan", recipe, "--hardware", "1xv100-32gb")
    assert "does not fit: host memory: " in text
    assert "Options: " in text
    many = refusal(capsys, "plan", recipe, "--hardware", "8xv100-16gb", "--nproc", 16)
    assert "has 8 GPUs, 16 ranks need one each" in many


@pytest.mark.slow
def test_nvme_takes_what_the_host_cannot(capsys, tmp_path):
    arguments = ["--hardware", "8xv100-32gb", "--set", f"memory={{nvme_dir: {tmp_path}, host_gib: 100}}", "--json"]
    assert leave("plan", RECIPES / "llama2-13b.yaml", *arguments) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["strategy"]["state"] == "nvme"
    whole = 12 * PARAMETERS["llama2-13b"] / 8
    assert plan["strategy"]["state_host_bytes"] > 0, "what is left of the host keeps a part of the state"
    assert whole - plan["strategy"]["state_host_bytes"] <= sum(plan["nvme_wear"].values()) < whole
    assert leave("plan", RECIPES / "llama2-13b.yaml", *arguments, "--set", "engine.state_host_bytes=0") == 0
    assert sum(json.loads(capsys.readouterr().out)["nvme_wear"].values()) == pytest.approx(whole, rel=0.001)


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_not_started(capsys, tmp_path):
    arguments = ["--nproc", 1, "--set", "memory.host_gib=4", "--set", f"output.dir={tmp_path / 'out'}"]
    arguments += ["--set", "train.max_steps=1"]
    text = refusal(capsys, "finetune", RECIPES / "llama2-13b.yaml", *arguments)
    assert "does not fit this machine, which has no GPU: host memory" in text
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_a_drive_of_another_box_is_planned_with_by_its_size(capsys):
    arguments = ["--hardware", "8xv100-16gb", "--set", "memory={nvme_gib: 1500, host_gib: 100}", "--json"]
    assert leave("plan", RECIPES / "llama2-13b.yaml", *arguments) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["strategy"]["state"] == "nvme"
    assert plan["tiers"]["nvme"]["granted_bytes"] == 1500 * GIB
    assert plan["tiers"]["nvme"]["granted_by"] == "memory.nvme_gib"
