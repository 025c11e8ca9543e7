"""The example scripts: they differ by one import, and the one on ftkit trains, on two ranks."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState

from tests.worlds import World

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"


def code_lines(name: str) -> list[str]:
    """Return a script's lines without its docstring."""
    return (EXAMPLES / name).read_text().split('"""', 2)[2].splitlines()


def test_one_import_is_all_that_differs() -> None:
    pairs = zip(code_lines("stock_trainer.py"), code_lines("ftkit_trainer.py"), strict=True)
    assert [(a, b) for a, b in pairs if a != b] == [
        ("from transformers import Trainer, TrainingArguments", "from ftkit import Trainer, TrainingArguments")
    ]


def run_example(output: str) -> None:
    """Run the script as `torchrun` would on this rank."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    steps = ["--max_steps", "2", "--per_device_train_batch_size", "2", "--logging_steps", "1", "--report_to", "none"]
    sys.argv = ["ftkit_trainer.py", "--output_dir", output, "--use_cpu", "--ftkit", '{"stage": 3}', *steps]
    runpy.run_path(str(EXAMPLES / "ftkit_trainer.py"), run_name="__main__")


def test_the_example_trains(world2: World, tmp_path: Path) -> None:
    world2.run(run_example, str(tmp_path))
    assert (tmp_path / "model.safetensors").exists()
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == [1, 2]
