"""What a run saves is whole: others' files stay, every buffer is there, and what cannot be saved is refused at the start.

Callbacks find `checkpoint-N` complete under its name, and what they leave or change there is no damage. Adapters are
compared with the file that the stock Trainer writes.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from huggingface_hub import PyTorchModelHubMixin
from peft import IA3Config, LoraConfig, RandLoraConfig, VeraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback

import ftkit
from ftkit.engine.checkpoint.saving import Saving
from ftkit.errors import UserError
from ftkit.hf.trainer.checkpoint_files import read_trainer_state
from ftkit.hf.trainer.run_checkpoints import check_folder
from ftkit.hf.weights.saving import save_arguments
from tests.hf import runs
from tests.hf.runs import Run

SAVING = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1}
SHARDED = {"stage": 3}


def small() -> Any:
    """Return a Llama of one block."""
    return runs.llama(num_hidden_layers=1)


# --- files of others


class Writer(TrainerCallback):
    """Somebody's callback that writes into a checkpoint, changes a file of it, and removes one."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Do that on rank 0, once everything is there."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        assert (folder / "ftkit" / "manifest.json").is_file()
        if not state.is_world_process_zero:  # may come here while rank 0 is at work below
            return
        check_folder(folder)
        (folder / "merged").mkdir()
        (folder / "merged" / "notes.txt").write_text("mine")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "mine": 1}, indent=1))
        (folder / "training_args.bin").unlink()


class Early(TrainerCallback):
    """Somebody's callback that makes the folder of a checkpoint before it is saved."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the step's samples."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "samples.txt").write_text("mine")


class WritesItself:
    """A user's Trainer that adds a file to each checkpoint."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        assert (folder / "trainer_state.json").is_file()
        (folder / f"extra{self.args.process_index}.txt").write_text("mine")


def run_of(callbacks: list[Any], **changes: Any) -> Run:
    """Return a run that saves each step."""
    return Run(model=small, rows=24, arguments=SAVING, options={"callbacks": callbacks}, ftkit=SHARDED, **changes)


def saves_and_goes_on(folder: str, run: Run) -> list[str]:
    """Train, go on from the second checkpoint, and return its files."""
    trainer = runs.make_trainer("ours", folder, run)
    trainer.train()
    files = runs.files_in(f"{folder}/checkpoint-2")
    check_folder(Path(folder, "checkpoint-2"))
    again = runs.make_trainer("ours", folder, run_of([]))
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    one, two = trainer.units.state_dict(), again.units.state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    return files


def test_what_a_callback_writes_into_a_checkpoint_stays_and_is_no_damage(world2, tmp_path):
    files = world2.run(saves_and_goes_on, str(tmp_path), run_of([Writer()]))[0]
    assert "merged/notes.txt" in files
    assert "training_args.bin" not in files


def test_files_that_are_there_before_the_checkpoint_stay(world1, tmp_path):
    [files] = world1.run(saves_and_goes_on, str(tmp_path), run_of([Early()]))
    assert {"samples.txt", "trainer_state.json"} <= set(files)


def test_what_a_trainer_of_ones_own_adds_stays(world2, tmp_path):
    files = world2.run(saves_and_goes_on, str(tmp_path), run_of([], mixin=WritesItself))[0]
    assert {"extra0.txt", "extra1.txt"} <= set(files)


class Restarts(TrainerCallback):
    """Notes whether a checkpoint was complete when `on_save` was called, without defining it on the class."""


def names_at_save(folder: str) -> list[list[str]]:
    """Train with a callback whose `on_save` is an attribute of the object."""
    found: list[list[str]] = []
    callback = Restarts()
    callback.on_save = lambda args, state, control, **_: found.append(  # type: ignore[method-assign]  # of one instance
        sorted(path.name for path in Path(args.output_dir).iterdir())
    )
    runs.make_trainer("ours", folder, run_of([callback])).train()
    return found


def test_a_callback_by_attribute_finds_the_folder(world1, tmp_path):
    [found] = world1.run(names_at_save, str(tmp_path))
    assert found == [["checkpoint-1"], ["checkpoint-1", "checkpoint-2"], ["checkpoint-1", "checkpoint-2", "checkpoint-3"]]


class Ends(TrainerCallback):
    """Somebody's callback that raises while the checkpoint of the second step is being written."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise once."""
        if state.global_step == 2 and (error := self.error) is not None:
            self.error = None
            raise error


def ended_early(folder: str, error: BaseException) -> list[str]:
    """Train until a callback raises, and return the folders; then go on from the last of them, and save once more."""
    trainer = runs.make_trainer("ours", folder, run_of([Ends(error)]))
    with pytest.raises(type(error)):
        trainer.train()
    found = sorted(path.name for path in Path(folder).iterdir())
    check_folder(Path(folder, "checkpoint-2"))
    trainer.train(resume_from_checkpoint=True)
    shutil.rmtree(f"{folder}/checkpoint-3")
    trainer._save_checkpoint(trainer.model, None)  # outside of train: whole when it returns
    check_folder(Path(folder, "checkpoint-3"))
    return found


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_a_checkpoint_is_finished_when_an_error_ends_the_run(error, world1, tmp_path):
    assert world1.run(ended_early, str(tmp_path), error) == [["checkpoint-1", "checkpoint-2"]]


def beside_a_hidden_folder(folder: str) -> list[str]:
    """Train where somebody's folder has the name that a checkpoint has on its way."""
    Path(folder, ".checkpoint-2.writing").mkdir()
    Path(folder, ".checkpoint-2.writing", "notes.txt").write_text("mine")
    runs.make_trainer("ours", folder, run_of([])).train()
    return runs.files_in(f"{folder}/.checkpoint-2.writing") + sorted(os.listdir(folder))


def test_a_folder_under_a_hidden_name_stays(world1, tmp_path):
    names = [".checkpoint-2.writing", "checkpoint-1", "checkpoint-3"]
    assert world1.run(beside_a_hidden_folder, str(tmp_path)) == [["notes.txt", *names]]


class Does(TrainerCallback):
    """Somebody's callback that does something with the checkpoint of the second step."""

    def __init__(self, name: str, rank: int = 0) -> None:
        self.name, self.rank = name, rank

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write a file of its name before it is there."""
        if self.name == "file" and state.global_step == 2:
            Path(args.output_dir, "checkpoint-2").write_text("mine")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go elsewhere while it is being written."""
        if self.name == "elsewhere" and state.global_step == 2:
            os.chdir("/")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Change it."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if state.global_step != 2 or runs.rank() != self.rank:
            return
        if self.name == "list":
            (folder / "contents.json").write_text("{}")
        elif self.name == "gone":
            (folder / "config.json").unlink()
        elif self.name == "best":
            shutil.rmtree(folder)
        elif self.name == "added":
            torch.save({"mine": 1}, folder / "rng_state_data.pth")


ALL = ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


class Fails(TrainerCallback):
    """Somebody's callback that cannot upload the last checkpoint."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise."""
        if state.global_step == 3:
            raise ConnectionError("mine")


def failed(folder: str) -> int:
    """Train with a callback that changes checkpoints and one that raises, and go on from the last."""
    with pytest.raises(ConnectionError):
        runs.make_trainer("ours", folder, run_of([Writer(), Fails()])).train()
    again = runs.make_trainer("ours", folder, run_of([]))
    again.train(resume_from_checkpoint=True)
    return again.state.global_step


def test_a_checkpoint_that_a_callback_changed_is_whole_when_another_callback_raises(world1, tmp_path):
    assert world1.run(failed, str(tmp_path)) == [3]


class Uploads:
    """A user's Trainer with an upload of its own."""

    def init_hf_repo(self, token: Any = None, private: Any = None) -> None:
        self.hub_model_id, self.push_in_progress, self.given = "somebody/something", None, []

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        check_folder(Path(checkpoint_folder))
        self.given.append(Path(checkpoint_folder).name)


def uploaded(folder: str) -> list[str]:
    """Train with it, and return what it was given."""
    run = run_of([], mixin=Uploads)
    trainer = runs.make_trainer("ours", folder, replace(run, arguments={**run.arguments, "push_to_hub": True}))
    trainer.train()
    return trainer.given


def test_an_upload_of_ones_own_is_given_whole_checkpoints(world1, tmp_path):
    assert world1.run(uploaded, str(tmp_path)) == [ALL]


class Leaves:
    """A user's Trainer that leaves odd files in a checkpoint."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        (folder / "rows").symlink_to("/etc/hostname")
        (folder / "nowhere").symlink_to("/nowhere")
        (folder / "no\u00a0break").write_text("mine")
        if self.state.global_step == 3:
            (folder / "contents.json").write_text("mine")


def odd_files(folder: str) -> tuple[list[str], str]:
    """Train with it, and go on from a checkpoint."""
    trainer = runs.make_trainer("ours", folder, run_of([], mixin=Leaves))
    trainer.train()
    again = runs.make_trainer("ours", folder, run_of([], mixin=Leaves))
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    check_folder(Path(folder, "checkpoint-2"))
    return sorted(os.listdir(f"{folder}/checkpoint-2")), trainer.save_problem or ""


def test_links_and_odd_names_are_no_damage(world1, tmp_path):
    [(names, problem)] = world1.run(odd_files, str(tmp_path))
    assert {"rows", "nowhere", "no\u00a0break"} <= set(names)
    assert "contents.json" in problem


class Saves(TrainerCallback):
    """Somebody's callback that saves by itself and reads what was saved."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.found: list[bool] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Do that."""
        self.trainer._save_checkpoint(self.trainer.model, None)
        self.found.append(Path(args.output_dir, f"checkpoint-{state.global_step}", "trainer_state.json").is_file())

    on_epoch_end = on_log


def saved_by_callback(folder: str) -> list[bool]:
    """Train with it."""
    callback = Saves()
    callback.trainer = runs.make_trainer("ours", folder, run_of([callback]))
    callback.trainer.train()
    return callback.found


def test_a_checkpoint_that_a_callback_asks_for_is_there_at_once(world1, tmp_path):
    [found] = world1.run(saved_by_callback, str(tmp_path))
    assert len(found) >= 4
    assert all(found)


def without_the_engine(folder: str) -> str:
    """Go on from a checkpoint with ftkit=None."""
    run = replace(run_of([]), model=Adapted("vera"))
    runs.make_trainer("ours", folder, run).train()
    try:
        runs.make_trainer("ours", folder, replace(run, ftkit=None)).train(resume_from_checkpoint=True)
    except UserError as error:
        return str(error)
    return "went on"


def test_a_checkpoint_of_the_engine_is_not_resumed_without_it(world1, tmp_path):
    assert "ftkit=None cannot read" in world1.run(without_the_engine, str(tmp_path))[0]


class Shrinks(TrainerCallback):
    """Somebody's callback that edits weights before a step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Make them smaller."""
        with torch.no_grad():
            model.lm_head.weight.mul_(0.9)


def edited(folder: str) -> tuple[list[str], bool]:
    """Train with it while saves are slow, and compare a continuation; the first save comes with the first edit."""
    write = Saving._write
    with mock.patch.object(Saving, "_write", lambda saving: (time.sleep(0.1), write(saving))):
        run = replace(run_of([Shrinks()]), ftkit={"stage": 1, "update": "now"})
        trainer = runs.make_trainer("ours", folder, run)
        trainer.train()
    again = runs.make_trainer("ours", folder, run)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    one, two = trainer.units.state_dict(), again.units.state_dict()
    return sorted(path.name for path in Path(folder).iterdir()), all(torch.equal(one[name], two[name]) for name in one)


def test_a_checkpoint_has_the_weights_of_its_step_whatever_is_edited_after(world1, tmp_path):
    assert world1.run(edited, str(tmp_path)) == [(ALL, True)]


class Quiet(Does):
    """The same without `on_save`, so that saves run beside training."""

    on_save = TrainerCallback.on_save


def done(folder: str, callback: Any, **arguments: Any) -> tuple[list[str], str | None, int]:
    """Train with a callback, and return the folders, what the last failed save said, and the steps made."""
    told: list[str] = []
    run = run_of([callback], eval_rows=6)
    run = replace(run, arguments={**run.arguments, **arguments})
    trainer = runs.make_trainer("ours", folder, run)
    say = trainer.checkpoints._say
    trainer.checkpoints._say = lambda step, problem: (told.append(problem), say(step, problem))
    trainer.train()
    return sorted(path.name for path in Path(folder).iterdir()), "".join(told), trainer.state.global_step


def test_a_file_under_a_checkpoints_name_stays(world1, tmp_path):
    [(names, told, steps)] = world1.run(done, str(tmp_path), Does("file"))
    assert (names, steps) == (ALL, 3)
    assert "checkpoint-2 is there and is not a folder" in told
    assert (tmp_path / "checkpoint-2").read_text() == "mine"


def test_a_list_that_a_callback_replaced_is_told(world1, tmp_path):
    [(names, told, steps)] = world1.run(done, str(tmp_path), Does("list"))
    assert (names, steps) == (ALL, 3)
    assert "a callback has changed" in told
    assert "contents.json" in told


def test_what_a_callback_of_any_rank_removes_is_no_damage(world2, tmp_path):
    assert world2.run(done, str(tmp_path), Does("gone", rank=1)) == [(ALL, "", 3)] * 2
    check_folder(tmp_path / "checkpoint-2")


def test_a_file_that_a_callback_adds_is_no_random_state(world1, tmp_path):
    world1.run(done, str(tmp_path), Does("added"))
    check_folder(tmp_path / "checkpoint-2")


def without_the_best(folder: str) -> tuple[int, str]:
    """Train with a callback that removes the best checkpoint, of the second step."""
    scores = iter([0.0, 1.0, 0.5])
    best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    run = run_of([Does("best")], eval_rows=6)
    run.options["compute_metrics"] = lambda prediction: {"score": next(scores)}
    run = replace(run, arguments={**run.arguments, **best, "metric_for_best_model": "score", "greater_is_better": True})
    trainer = runs.make_trainer("ours", folder, run)
    trainer.train()
    return trainer.state.global_step, Path(trainer.state.best_model_checkpoint).name


def test_a_best_checkpoint_that_was_removed_ends_no_run(world1, tmp_path):
    assert world1.run(without_the_best, str(tmp_path)) == [(3, "checkpoint-2")]


def elsewhere(folder: str) -> list[str]:
    """Train in a folder that is named from the working folder, which a callback changes during a save."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        done("out", Quiet("elsewhere"), save_steps=2)
    except FileNotFoundError:  # `out` from there, at the end
        pass
    finally:
        os.chdir(before)
    return sorted(path.name for path in Path(folder, "out").iterdir())


def test_who_changes_the_working_folder_loses_no_checkpoint(world1, tmp_path):
    [names] = world1.run(elsewhere, str(tmp_path))
    assert "checkpoint-2" in names
    check_folder(tmp_path / "out" / "checkpoint-2")


ODD = [{"logging_strategy": "no", "logging_steps": 0}, {"eval_steps": 0}]


def resumed_by_steps(folder: str, arguments: dict[str, Any]) -> int:
    """Train with steps of none, and go on with steps of one."""
    done(folder, Quiet(""), **arguments)
    run = run_of([], eval_rows=6)
    by_steps = {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    again = runs.make_trainer("ours", folder, replace(run, arguments={**run.arguments, **by_steps}))
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return len([each for each in again.state.log_history if "eval_loss" in each])


@pytest.mark.parametrize("arguments", ODD)
def test_a_run_that_did_nothing_by_steps_goes_on(arguments, world1, tmp_path):
    assert world1.run(resumed_by_steps, str(tmp_path), arguments) == [1]


def test_a_metric_that_is_true_or_false_is_no_damage(world1, tmp_path):
    world1.run(done, str(tmp_path), Quiet(""))
    path = tmp_path / "checkpoint-2" / "trainer_state.json"
    path.write_text(path.read_text().replace('"best_metric": null', '"best_metric": true'))
    assert read_trainer_state(path).best_metric is True


# --- adapters and buffers


class Normed(nn.Module):
    """A head with batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.out = nn.Linear(32, runs.VOCABULARY)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits (B, T, V) of hidden (B, T, D)."""
        return self.out(self.norm(hidden.transpose(1, 2)).transpose(1, 2))


def normed() -> Any:
    """Return a Llama with that head."""
    model = small()
    torch.manual_seed(11)
    model.lm_head = Normed()
    return model


PLACES = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
ADAPTERS: dict[str, tuple[Any, Any]] = {
    "vera": (small, VeraConfig(r=4, **PLACES)),
    "vera without projections": (small, VeraConfig(r=4, save_projection=False, **PLACES)),
    "randlora": (small, RandLoraConfig(r=4, **PLACES)),
    "ia3": (small, IA3Config(task_type="CAUSAL_LM")),
    "batch norm": (normed, LoraConfig(r=2, modules_to_save=["lm_head"], **PLACES)),
}


@dataclass(frozen=True)
class Adapted:
    """Makes a model with one of the adapters."""

    name: str

    def __call__(self) -> Any:
        base, config = ADAPTERS[self.name]
        torch.manual_seed(3)
        return get_peft_model(base(), config)


def adapters_of(folder: str, name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], bool]:
    """Return what stock and ours save of an adapter, and whether a resumed run ends the same."""
    saved = {}
    for kind in ("stock", "ours"):
        run = Run(model=Adapted(name), rows=24, arguments={**SAVING, "max_steps": 2}, ftkit=SHARDED)
        trainer = runs.make_trainer(kind, f"{folder}/{kind}", run)
        trainer.train()
        trainer.save_model(f"{folder}/{kind}/out")
        saved[kind] = load_file(f"{folder}/{kind}/out/adapter_model.safetensors")
    again = runs.make_trainer("ours", f"{folder}/ours", run)
    again.train(resume_from_checkpoint=f"{folder}/ours/checkpoint-1")
    again.save_model(f"{folder}/again")
    resumed = load_file(f"{folder}/again/adapter_model.safetensors")
    same = all(torch.equal(tensor, resumed[key]) for key, tensor in saved["ours"].items())
    return saved["stock"], saved["ours"], same


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_saved_with_everything_that_stock_saves(name, world1, tmp_path):
    [(stock, ours, same)] = world1.run(adapters_of, str(tmp_path), name)
    assert sorted(ours) == sorted(stock)
    for key, tensor in ours.items():
        assert torch.allclose(tensor.float(), stock[key].float(), rtol=1e-4, atol=1e-5), key
    assert same


def best_of_two(folder: str, name: str) -> bool:
    """Train two adapters, one with a name, and say whether the best, saved as weights alone, came back."""

    def model() -> Any:
        torch.manual_seed(3)
        adapted = get_peft_model(small(), LoraConfig(r=2, **PLACES), adapter_name=name)
        if name == "default":
            adapted.add_adapter("second", LoraConfig(r=2, target_modules=["k_proj"], task_type="CAUSAL_LM"))
            adapted.base_model.set_adapter(["default", "second"])
        return adapted

    scores = iter([0.0, 1.0, 0.5])
    best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_only_model": True}
    arguments = {**SAVING, **best, "metric_for_best_model": "score", "greater_is_better": True}
    seen: list[dict[str, torch.Tensor]] = []
    options = {"compute_metrics": lambda prediction: seen.append(trainer.units.state_dict()) or {"score": next(scores)}}
    run = Run(model=model, rows=24, eval_rows=6, arguments=arguments, options=options, ftkit=SHARDED)
    trainer = runs.make_trainer("ours", folder, run)
    trainer.train()
    now = trainer.units.state_dict()
    return all(torch.equal(now[key], tensor) for key, tensor in seen[1].items())


@pytest.mark.parametrize("name", ["mine", "default"])
def test_the_best_of_adapters_with_names_comes_back(name, world1, tmp_path):
    assert world1.run(best_of_two, str(tmp_path), name) == [True]


# --- what cannot be saved


def mixtral(**changes: Any) -> Any:
    """Return a small mixture of experts, whose weights transformers merges on load."""
    fields = {"vocab_size": runs.VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 64}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**fields, **changes}))


def qwen_moe() -> Any:
    """Return another."""
    fields = {"vocab_size": runs.VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 16}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**fields))


def mixtral_with_lora() -> Any:
    """Return the mixture with an adapter on its attention."""
    return get_peft_model(mixtral(), LoraConfig(r=2, **PLACES))


def reached(folder: str, model: Any, **arguments: Any) -> str:
    """Train, and return at which step it was refused, with the refusal."""
    run = Run(model=model, rows=24, arguments={**SAVING, **arguments}, ftkit=SHARDED)
    trainer = runs.make_trainer("ours", folder, run)
    try:
        trainer.train()
        trainer.save_model(f"{folder}/out")
    except UserError as error:
        return f"step {trainer.state.global_step}: {error}"
    return "saved"


@pytest.mark.parametrize("model", [mixtral, qwen_moe])
def test_a_mixture_that_could_not_be_saved_is_refused_before_the_first_step(model, world1, tmp_path):
    [told] = world1.run(reached, str(tmp_path), model)
    if told != "saved":  # until mixtures are saved from shards
        assert told.startswith("step 0: ")
        assert "LoRA on the attention" in told


def test_an_adapter_of_a_mixture_is_saved(world1, tmp_path):
    assert world1.run(reached, str(tmp_path), mixtral_with_lora) == ["saved"]


# --- refused when the model is saved


class NoTemplate:
    """A processor that cannot be saved."""

    model_input_names = ("input_ids",)

    def save_pretrained(self, folder: Path) -> None:
        raise ValueError("no template")

    def pad(self, rows: Any, **kwargs: Any) -> Any:
        return transformers.default_data_collator(rows)


@pytest.mark.parametrize("what", ["generation", "processor"])
def test_what_lies_beside_the_weights_is_tried_before_they_are_written(what, tmp_path, caplog):
    def model() -> Any:
        made = small()
        if what == "generation":
            made.generation_config.temperature, made.generation_config.do_sample = 0.3, False
        return made

    arguments = {"max_steps": 1, "save_strategy": "no"}
    options = {"processing_class": NoTemplate} if what == "processor" else {}
    run = Run(model=model, rows=24, arguments=arguments, options=options, ftkit={"affinity": False})
    trainer = runs.make_trainer("ours", str(tmp_path / "run"), run)
    told = "`temperature`" if what == "generation" else "no template"
    trainer.train()
    assert told in caplog.text, "said at the beginning"
    with pytest.raises(UserError, match=f"the model cannot be saved as it is: (?s:.*){told}"):
        trainer.save_model(str(tmp_path / "out" / "model"))
    if what == "generation":
        with pytest.raises(UserError, match=f"the model cannot be saved as it is: (?s:.*){told}"):
            ftkit.save_model(trainer.units, tmp_path / "out" / "model")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("adapted", [False, True])
def test_a_refused_save_leaves_no_folder(adapted, tmp_path):
    model = small()
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])) if adapted else model
    with torch.no_grad():
        next(value for value in model.parameters() if value.requires_grad).fill_(1e6)
    units = ftkit.shard(model, {"affinity": False})
    (tmp_path / "mine").mkdir()
    for name in ("new/folder", "mine"):
        with pytest.raises(UserError, match=r"1e\+06.*such a model is not written"):
            ftkit.save_model(units, tmp_path / name, dtype="fp16")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]


# --- arguments that cannot be pickled


def local_arguments(folder: str) -> list[str]:
    """Train with arguments of a class that pickle cannot find."""

    class Mine(ftkit.TrainingArguments):
        pass

    run = Run(model=small, rows=24, arguments=SAVING, our_classes=(ftkit.Trainer, Mine), ftkit=SHARDED)
    trainer = runs.make_trainer("ours", folder, run)
    trainer.train()
    again = runs.make_trainer("ours", folder, run)
    again.train(resume_from_checkpoint=True)
    return runs.files_in(f"{folder}/checkpoint-3")


def test_arguments_that_cannot_be_pickled_cost_no_checkpoint(world1, tmp_path):
    [files] = world1.run(local_arguments, str(tmp_path))
    assert "training_args.json" in files
    assert "training_args.bin" not in files
    assert json.loads((tmp_path / "checkpoint-3" / "training_args.json").read_text())["max_steps"] == 3


def test_no_token_is_written_in_them(tmp_path):
    """Whether JSON has a form for all of them or not."""

    class Mine(ftkit.TrainingArguments):
        pass

    arguments = Mine(str(tmp_path), hub_token="hf_secret", use_cpu=True)
    for optimizer in (None, {"betas": torch.ones(2)}):
        arguments.optim_args = optimizer
        save_arguments(arguments, tmp_path)
        told = (tmp_path / "training_args.json").read_text()
        assert "<HUB_TOKEN>" in told
        assert "hf_secret" not in told


# --- modules around a model


class Wrapper(nn.Module):
    """A plain module around a transformers model, with a statistic of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, **batch: Any) -> Any:
        """Return the model's loss, and count."""
        if self.training:
            self.seen += 1
        return {"loss": self.inner(**batch).loss}


def wrapped(folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what stock and ours save of it, with the best checkpoint loaded at the end."""
    saved = []
    for kind in ("stock", "ours"):
        best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_only_model": True}
        columns = {"label_names": ["labels"], "remove_unused_columns": False}  # its forward names none
        run = Run(model=Wrapper, rows=24, eval_rows=6, arguments={**SAVING, **best, **columns}, ftkit=SHARDED)
        trainer = runs.make_trainer(kind, f"{folder}/{kind}", run)
        trainer.train()
        trainer.save_model(f"{folder}/{kind}/out")
        saved.append(load_file(f"{folder}/{kind}/out/model.safetensors"))
    return saved[0], saved[1]


def test_a_module_around_a_model_is_saved_and_its_best_checkpoint_loaded(world1, tmp_path):
    [(stock, ours)] = world1.run(wrapped, str(tmp_path))
    assert sorted(ours) == sorted(stock)
    assert int(ours["seen"]) == int(stock["seen"])
    runs.assert_same_weights(ours, stock)


# --- modules registered twice


def one_block_twice(model: Any) -> None:
    """The last block runs twice, with a buffer of its own."""
    first, last = model.model.layers
    last.mlp.act_fn.register_buffer("seen", torch.ones(2))
    model.model.layers = nn.ModuleList([first, last, last])
    model.config.num_hidden_layers = 3


def one_norm_twice(model: Any) -> None:
    for layer in model.model.layers:
        layer.input_layernorm = layer.post_attention_layernorm


@pytest.mark.parametrize("change", [one_block_twice, one_norm_twice])
def test_a_module_that_is_registered_twice_is_saved_under_both_names(change, tmp_path):
    model = runs.llama(num_hidden_layers=2).eval()
    change(model)
    rows = torch.arange(3, 9)[None]
    with torch.no_grad():
        before = model(input_ids=rows, use_cache=False).logits
    names = model.state_dict().keys()
    ftkit.save_model(ftkit.shard(model, {**SHARDED, "affinity": False}), tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == names
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=rows, use_cache=False).logits, before)


class SharedByCode(transformers.LlamaForCausalLM):
    """A model whose code registers a norm twice."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[0].input_layernorm = self.model.layers[0].post_attention_layernorm


def test_a_module_that_the_code_registers_twice_is_saved_once(tmp_path):
    model = SharedByCode(runs.llama(num_hidden_layers=1).config)
    ftkit.save_model(ftkit.shard(model, {**SHARDED, "affinity": False}), tmp_path)
    assert "model.layers.0.post_attention_layernorm.weight" not in load_file(tmp_path / "model.safetensors")
    again = SharedByCode.from_pretrained(tmp_path)
    assert again.model.layers[0].input_layernorm is again.model.layers[0].post_attention_layernorm


class Shared(nn.Module, PyTorchModelHubMixin):
    """A model of somebody's own that the hub's mixin saves and loads."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x)[:, 0] - labels).square().mean()}


class AroundShared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Shared()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.inner(x, labels)


class Metric(nn.Module):
    """Counts, with a state of its own and nothing that is saved."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}


class WithMetric(Shared):
    def __init__(self) -> None:
        super().__init__()
        self.metric = Metric()


@pytest.mark.parametrize("kind", [Shared, AroundShared, WithMetric])
def test_a_model_with_the_hubs_mixin_is_saved_as_by_stock(kind, tmp_path):
    rows = [{"x": torch.full((8,), 0.1 * n), "labels": float(n)} for n in range(8)]
    for module in (ftkit, transformers):
        torch.manual_seed(1)
        options = {"max_steps": 2, "save_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True}
        place = tmp_path / module.__name__
        trainer = module.Trainer(kind(), module.TrainingArguments(str(place), **options), train_dataset=rows)
        trainer.train()
        trainer.save_model()
    ours, stocks = (load_file(tmp_path / name / "model.safetensors") for name in ("ftkit", "transformers"))
    assert ours.keys() == stocks.keys()
    assert all(torch.allclose(ours[key], stocks[key], atol=1e-6) for key in stocks)
