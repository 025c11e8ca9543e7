"""Every place where the Hugging Face loop meets the engine is answered, or refused with a word for the user.

What is asked here could go wrong silently: an argument that the engine cannot honour, an engine that was asked for and
is not there, a checkpoint that is not whole, a file that a rank wrote alone, a copy of weights that are not there. The
runs themselves are in test_trainer.py.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint

import ftkit
from ftkit.hf.sharding import units_of
from ftkit.hf.trainer.arguments import check_arguments
from tests.hf import runs
from tests.hf.runs import Run, assert_same_history, assert_same_weights, files_in, make_trainer, train
from tests.hf.test_trainer import BASE, SHORT, changed

SAVING = changed(SHORT, save_strategy="steps", save_steps=1)
SHARDED = {"stage": 3}


# --- the argument


def parse(*words: str) -> Any:
    """Return what HfArgumentParser makes of a command line."""
    parser = transformers.HfArgumentParser(ftkit.TrainingArguments)
    return parser.parse_args_into_dataclasses(["--output_dir", "somewhere", "--use_cpu", *words])[0].ftkit


@pytest.mark.parametrize(
    "words, value",
    [
        ([], "auto"),
        (["--ftkit", "auto"], "auto"),
        (["--ftkit", "none"], None),
        (["--ftkit", '{"stage": 3}'], {"stage": 3}),
        (
            ["--ftkit", '{"reshard_after_forward": true, "device_gib": 14.5}'],
            {"reshard_after_forward": True, "device_gib": 14.5},
        ),
    ],
)
def test_the_command_line_sets_the_engine(words, value):
    assert parse(*words) == value


def test_a_file_sets_the_engine(tmp_path):
    path = tmp_path / "engine.yaml"
    path.write_text("stage: 1\nactivations: keep\n")
    assert parse("--ftkit", str(path)) == str(path)
    assert ftkit.EngineSettings.of(str(path)) == ftkit.EngineSettings(ftkit.Strategy(stage=1, activations="keep"))
    path.write_text("stage: 1\nactivations: keep\nstage: 3\n")
    with pytest.raises(ftkit.UserError, match="stage: given twice, first on line 1"):
        ftkit.EngineSettings.of(str(path))
    with pytest.raises(ftkit.UserError, match="activations: found 'recompte', needs 'auto', 'recompute' or 'keep'"):
        ftkit.EngineSettings.of({"activations": "recompte"})


@pytest.mark.parametrize(
    "value, words",
    [
        ({"stages": 3}, "unknown key 'stages' (did you mean 'stage'?)"),
        ({"stage": 4}, "stage: found 4, needs 'auto', 0, 1, 2 or 3"),
        ({"device_gib": -1}, "device_gib: found -1, needs greater than 0"),
        ("fast", "'fast' is neither 'auto' nor a .yaml file"),
    ],
)
def test_settings_that_are_refused(value, words):
    with pytest.raises(ftkit.UserError, match=re.escape(words)):
        ftkit.TrainingArguments("somewhere", use_cpu=True, ftkit=value)


def test_arguments_are_plain_data(tmp_path):
    arguments = ftkit.TrainingArguments(str(tmp_path), use_cpu=True, ftkit={"stage": 2})
    assert arguments.to_dict()["ftkit"] == {"stage": 2}
    assert json.loads(arguments.to_json_string())["ftkit"] == {"stage": 2}
    torch.save(arguments, tmp_path / "arguments.bin")
    assert torch.load(tmp_path / "arguments.bin", weights_only=False).ftkit == {"stage": 2}


@pytest.fixture
def trainer(tmp_path):
    """Return a function that builds our Trainer in this process."""

    def build(run: Run = SHORT, **arguments: Any) -> Any:
        return make_trainer("ours", str(tmp_path), changed(run, **arguments))

    return build


def test_one_process_that_sees_many_gpus_is_refused(tmp_path):
    arguments = ftkit.TrainingArguments(str(tmp_path), use_cpu=True)
    arguments._n_gpu = 4
    with pytest.raises(ftkit.UserError, match="torchrun --nproc-per-node 4"):
        check_arguments(arguments)


def test_stock_arguments_are_refused(tmp_path):
    runs.fresh_state()
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ftkit.UserError, match="TrainingArguments has no field 'ftkit'"):
        ftkit.Trainer(runs.llama(), arguments)


# --- the engine is there, or the run stops


class OwnModel:
    """A subclass that puts another model in the Trainer's place when the optimizer has been made."""

    def create_optimizer(self, model=None):
        super().create_optimizer(model)
        self.model = self.model_wrapped = runs.llama()
        return self.optimizer


class NoAccelerator:
    """A subclass that makes the accelerator and forgets the Trainer's."""

    def create_accelerator_and_postprocess(self):
        transformers.Trainer.create_accelerator_and_postprocess(self)


class OldTrainer(transformers.Trainer):
    """A user's Trainer, under the mixin: its methods take what the Trainer gives them, by name, and no more."""

    def create_optimizer(self):
        return super().create_optimizer()

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        return (loss, outputs) if return_outputs else loss


class OldTrainerOnTheEngine(ftkit.TrainerMixin, OldTrainer):
    """The same on the engine."""


def test_methods_of_a_users_trainer_under_the_mixin_are_given_what_the_trainer_gives(world2, stock, tmp_path):
    run = replace(
        changed(SHORT, eval_strategy="epoch"),
        eval_rows=6,
        stock_classes=(OldTrainer, transformers.TrainingArguments),
        our_classes=(OldTrainerOnTheEngine, ftkit.TrainingArguments),
    )
    assert_same_history(world2.run(train, "ours", str(tmp_path), run)[0], stock(run))


def unsupported(model):
    return torch.optim.AdamW(model.parameters(), amsgrad=True), None


def stepped(model):
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer, None


@pytest.mark.parametrize(
    "optimizers, words",
    [
        (unsupported, "amsgrad has no sharded form"),
        (stepped, "has stepped already"),
    ],
)
def test_optimizers_that_cannot_be_exchanged_are_refused(optimizers, words, trainer):
    with pytest.raises(ValueError, match=words):
        trainer(replace(SHORT, options={"optimizers": optimizers})).train()


def test_the_graph_of_the_forward_that_only_probed_is_gone_before_the_next(trainer):
    def labelled():
        return runs.labelled_rows(12)

    made, losses, alive = trainer(Run(model=runs.classifier, rows=labelled)), [], []
    made.model.register_forward_pre_hook(lambda *_: alive.append([loss() is not None for loss in losses]))
    made.model.register_forward_hook(lambda model, args, output: losses.append(weakref.ref(output.loss)))
    made.train()
    assert alive[:2] == [[], [False]]


@pytest.mark.parametrize("mixin", [OwnModel, NoAccelerator])
def test_a_run_without_the_engine_that_was_asked_for_stops_before_it_trains(mixin, world2, tmp_path):
    for words in world2.run(refusal_of, train, "ours", str(tmp_path), replace(SHORT, mixin=mixin)):
        assert "ftkit's engine was asked for" in words


def refusal_of(function, *arguments) -> str:
    """A case for a world: return the text of the UserError that a call raises."""
    try:
        function(*arguments)
    except ftkit.UserError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def test_our_trainer_with_none_is_the_stock_one(world2, tmp_path):
    """Same numbers bit for bit, same files."""
    run = changed(BASE, save_strategy="steps", save_steps=3, num_train_epochs=1)
    theirs = world2.run(train, "stock", str(tmp_path / "stock"), run)[0]
    ours = world2.run(train, "ours", str(tmp_path / "ours"), replace(run, ftkit=None, after=is_plain))[0]
    assert ours.after == (False, "DistributedDataParallel", "Accelerator")
    assert_same_history(ours, theirs, relative=0, absolute=0)
    assert files_in(tmp_path / "ours") == files_in(tmp_path / "stock")
    name = "checkpoint-3/model.safetensors"
    assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes()
    resumed = replace(run, ftkit=None, resume=str(tmp_path / "stock" / "checkpoint-3"))
    world2.run(train, "ours", str(tmp_path / "again"), changed(resumed, num_train_epochs=2))


def is_plain(trainer):
    return trainer.engine_is_on, type(trainer.model_wrapped).__name__, type(trainer.accelerator).__name__


# --- what the loop finds in the model


def stored_bytes(parameter) -> int:
    """Return the bytes behind a parameter, which a resharded one would refuse to show."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.untyped_storage().nbytes()


def look_around(trainer):
    units = units_of(trainer.model)
    layer = trainer.model.model.layers[0]
    return {
        "wrapped": trainer.model_wrapped is trainer.model,
        "class": (type(trainer.model).__name__, isinstance(trainer.model, transformers.LlamaForCausalLM)),
        "parameters": trainer.model.num_parameters(),
        "shape": tuple(layer.mlp.up_proj.weight.shape),
        "stored": stored_bytes(layer.mlp.up_proj.weight),
        "checkpointing": layer.gradient_checkpointing,
        "activations": units.strategy.activations,
        "scaler": trainer.accelerator.scaler,
        "autocast": trainer.accelerator.native_amp,
        "dtype": str(trainer.model.dtype),
    }


def test_the_model_stays_the_object_it_was(world2, stock, tmp_path):
    run = replace(changed(SHORT, gradient_checkpointing=True), ftkit=SHARDED, after=look_around)
    ours = world2.run(train, "ours", str(tmp_path), run)[0]
    assert_same_history(ours, stock(SHORT))
    numel = sum(p.numel() for p in runs.llama().parameters())
    assert ours.after == {
        "wrapped": True,
        "class": ("LlamaForCausalLM", True),
        "parameters": numel,
        "shape": (56, 32),
        "stored": 4,  # one NaN, expanded
        "checkpointing": False,
        "activations": "recompute",
        "scaler": None,
        "autocast": False,
        "dtype": "torch.float32",
    }


def test_bf16_computes_in_bf16_without_autocast(world2, stock, tmp_path):
    run = replace(changed(BASE, bf16=True), ftkit=SHARDED, after=look_around)
    ours = world2.run(train, "ours", str(tmp_path), run)[0]
    assert ours.after["dtype"] == "torch.bfloat16"
    assert ours.after["autocast"] is False
    theirs = stock(BASE)
    # A bf16 kernel of another CPU generation sums in another order: the limits are far above a rounding of 2**-8.
    assert ours.column("loss") == pytest.approx(theirs.column("loss"), rel=0.05)
    assert ours.column("loss") != pytest.approx(theirs.column("loss"), rel=1e-5)
    assert ours.column("grad_norm") == pytest.approx(theirs.column("grad_norm"), rel=0.2)


def force_overflows(trainer):
    trainer.add_callback(HugeScale())


class HugeScale(transformers.TrainerCallback):
    """Sets a loss scale that overflows for three steps."""

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        if state.global_step == 0:
            optimizer.optimizer.loss_scale.value = 2.0**20


def loss_scale(trainer):
    scale = trainer.sharded_optimizer.loss_scale
    return scale.value, scale.skipped_steps


def test_fp16_skips_overflows_freezes_the_learning_rate_and_remembers_its_scale(world2, stock, tmp_path):
    run = replace(changed(BASE, fp16=True, save_strategy="steps", save_steps=5), ftkit=SHARDED, after=loss_scale)
    ours = world2.run(train, "ours", str(tmp_path / "one"), replace(run, before=force_overflows))[0]
    value, skipped = ours.after
    assert 1 <= skipped <= 5
    assert value == 2.0 ** (20 - skipped)
    rates, norms = ours.column("learning_rate"), ours.column("grad_norm")
    made = [norm != float("inf") for norm in norms]
    assert made.count(False) == skipped
    plain = stock(BASE).column("learning_rate")
    assert rates == pytest.approx([plain[sum(made[:step])] for step in range(6)])  # as many as steps were made before
    resumed = replace(run, resume=str(tmp_path / "one" / "checkpoint-5"))
    again = world2.run(train, "ours", str(tmp_path / "two"), resumed)[0]
    assert again.after == (value, skipped)
    assert_same_history(again, ours, leave_out=["train_loss"])


def in_vain(trainer) -> dict[str, str]:
    """Try on every rank what would need weights that lie elsewhere; return what each attempt raised."""
    model, told = trainer.model, {}
    attempts = {
        "state_dict": lambda: model.state_dict(),
        "block": lambda: model.model.layers[0].state_dict(),
        "head": lambda: model.lm_head.state_dict(),
        "save_pretrained": lambda: model.save_pretrained(trainer.args.output_dir),
        "deepcopy": lambda: copy.deepcopy(model),
        "copy": lambda: copy.copy(model.lm_head),
        "pickle": lambda: pickle.dumps(model),
        "torch.save": lambda: torch.save(model.model.layers[1], f"{trainer.args.output_dir}/x{runs.rank()}"),
        "optimizer": lambda: trainer.optimizer.state_dict(),
        "again": lambda: ftkit.shard(model),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
            told[name] = "nothing was raised"
        except (RuntimeError, TypeError, ValueError) as error:
            told[name] = str(error)
    return told


def test_what_would_need_weights_of_other_ranks_raises_with_the_way_out(world2, tmp_path):
    for outcome in world2.run(train, "ours", str(tmp_path), replace(SHORT, ftkit=SHARDED, after=in_vain)):
        told = outcome.after
        for name in ("state_dict", "block", "head", "save_pretrained"):
            assert "trainer.save_model()" in told[name], (name, told[name])
        for name in ("deepcopy", "copy", "pickle", "torch.save"):
            assert "cannot be copied or pickled" in told[name], (name, told[name])
        assert "ftkit.save_checkpoint()" in told["optimizer"]
        assert "is sharded already" in told["again"]


def resize_after(trainer):
    trainer.evaluate()
    try:
        trainer.model.resize_token_embeddings(runs.VOCABULARY + 8)
        trainer.evaluate()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_resizing_embeddings_before_works_and_after_is_an_error(world2, stock, tmp_path):
    run = replace(SHORT, model=resized)
    ours = world2.run(train, "ours", str(tmp_path / "before"), replace(run, ftkit=SHARDED))[0]
    assert_same_history(ours, stock(run))
    late = replace(BASE, ftkit=SHARDED, before=resize_after)
    for words in world2.run(before_only, "ours", str(tmp_path / "after"), late):
        assert words.startswith("UserError"), words


def resized():
    model = runs.llama()
    torch.manual_seed(3)
    model.resize_token_embeddings(runs.VOCABULARY + 7, mean_resizing=False)
    return model


def before_only(kind, folder, run):
    return run.before(make_trainer(kind, folder, run))


# --- files


@pytest.fixture(scope="module")
def saved(world2, tmp_path_factory):
    """The output folder of a run on two ranks that saved each step."""
    folder = tmp_path_factory.mktemp("saved")
    world2.run(train, "ours", str(folder), replace(SAVING, ftkit=SHARDED))
    return folder


def test_a_checkpoint_is_the_trainers_with_a_folder_of_the_engines(saved, world2, tmp_path):
    world2.run(train, "stock", str(tmp_path), SAVING)
    ours, theirs = set(files_in(saved / "checkpoint-2")), set(files_in(tmp_path / "checkpoint-2"))
    assert theirs - ours == {"model.safetensors", "optimizer.pt"}
    assert {Path(name).parts[0] for name in ours - theirs} == {"ftkit", "contents.json"}
    assert "ftkit/manifest.json" in ours
    assert not list(saved.glob(".*"))
    one, two = (json.loads((f / "checkpoint-2/config.json").read_text()) for f in (saved, tmp_path))
    assert one == two
    assert one["architectures"] == ["LlamaForCausalLM"]
    state = json.loads((saved / "checkpoint-2/trainer_state.json").read_text())
    assert state["global_step"] == 2


def resume(folder: Path | str, world, tmp_path, run: Run = SAVING) -> str:
    """Return the refusal of a resume from `folder`."""
    words = world.run(refusal_of, train, "ours", str(tmp_path), replace(run, resume=str(folder), ftkit=SHARDED))
    return words[0]


def test_a_stock_checkpoint_is_refused_with_the_way_out(world1, world2, tmp_path):
    world1.run(train, "stock", str(tmp_path / "stock"), SAVING)
    words = resume(tmp_path / "stock" / "checkpoint-1", world2, tmp_path)
    assert "no checkpoint of ftkit's engine" in words
    assert "give the folder as the model" in words


@pytest.mark.parametrize(
    "lost, words",
    [
        ("contents.json", "contents.json: No such file"),
        ("ftkit/model.layers.1.exp_avg.safetensors", "model.layers.1.exp_avg.safetensors: No such file"),
    ],
)
def test_a_checkpoint_that_lost_a_file_is_refused(lost, words, saved, world2, tmp_path):
    shutil.copytree(saved / "checkpoint-1", tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-1" / lost).unlink()
    assert words in resume(tmp_path / "checkpoint-1", world2, tmp_path)


def test_a_checkpoint_that_is_being_written_is_never_taken(saved, world2, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    (folder / "checkpoint-2").rename(folder / ".checkpoint-2.writing")
    shutil.copytree(saved / "checkpoint-2", folder / ".checkpoint-3.writing" / "checkpoint-3")
    assert get_last_checkpoint(str(folder)) == str(folder / "checkpoint-1")
    run = replace(SAVING, resume=True, ftkit=SHARDED)
    ours = world2.run(train, "ours", str(folder), run)[0]
    assert [line["step"] for line in ours.history if "loss" in line] == [1, 2]
    assert sorted(path.name for path in folder.iterdir() if "2" in path.name) == ["checkpoint-2"]


class FailsWhileSaving:
    """One rank, or rank 0, has no room for a small file of the second checkpoint."""

    def _save_rng_state(self, output_dir):
        if self.state.global_step == 2 and self.args.process_index == 1:
            raise OSError("no space left on device")
        super()._save_rng_state(output_dir)


class FailsWithTheScheduler(FailsWhileSaving):
    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        if self.state.global_step == 2 and self.args.process_index == 0:
            raise RuntimeError("PytorchStreamWriter failed writing file")

    def _save_rng_state(self, output_dir):
        transformers.Trainer._save_rng_state(self, output_dir)


@pytest.mark.quick(1)
@pytest.mark.parametrize("mixin", [FailsWhileSaving, FailsWithTheScheduler])
def test_a_save_that_fails_on_one_rank_costs_a_checkpoint_and_not_the_run(mixin, world2, tmp_path):
    run = replace(SAVING, ftkit=SHARDED)
    expected = world2.run(train, "ours", str(tmp_path / "sound"), run)[0]
    ours = world2.run(train, "ours", str(tmp_path / "full"), replace(run, mixin=mixin))[0]
    assert_same_history(ours, expected, relative=0, absolute=0)
    left = {path.name for path in (tmp_path / "full").iterdir()}
    assert left == {path.name for path in (tmp_path / "sound").iterdir()} - {"checkpoint-2"}, "and no debris"


def save_and_count(trainer):
    folder = Path(trainer.args.output_dir) / "model"
    sent = dict(trainer.units.comm.bytes_sent)
    trainer.save_model(str(folder))
    return {key: value - sent.get(key, 0) for key, value in trainer.units.comm.bytes_sent.items()}


@pytest.mark.parametrize("model, flags", [(runs.llama, {}), (runs.tied_llama, {"bf16": True})])
def test_save_model_writes_a_folder_that_opens_without_gathering(model, flags, world2, tmp_path):
    run = replace(changed(SHORT, **flags), model=model, ftkit=SHARDED, after=save_and_count)
    ours = world2.run(train, "ours", str(tmp_path), run)[0]
    assert ours.after.get("all_gather", 0) == 0
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert opened.dtype == torch.float32  # the model's own, whatever the dtype of computation
    weights = {name: tensor.to(ours.weights[name].dtype) for name, tensor in opened.state_dict().items()}
    assert_same_weights(weights, ours.weights, limit=0)  # the fp32 masters, in the narrower dtype
    names = {"model.safetensors", "config.json", "generation_config.json", "training_args.bin"}
    assert {path.name for path in (tmp_path / "model").iterdir()} == names


def test_save_only_model_gives_folders_that_open(world2, tmp_path):
    run = replace(changed(SAVING, save_only_model=True), ftkit=SHARDED)
    ours = world2.run(train, "ours", str(tmp_path), run)[0]
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert_same_weights(opened.state_dict(), ours.weights, limit=0)
    assert not (tmp_path / "checkpoint-2" / "ftkit").exists()


class Hub:
    """A hub that writes down what it is given."""

    def __init__(self):
        self.given = []

    def upload_folder(self, folder_path=None, **kwargs):
        self.given.append((Path(folder_path).name, sorted(os.listdir(folder_path))))
        return self

    def is_done(self):
        return True


class OwnHub:
    """A Trainer whose hub is ours."""

    def init_hf_repo(self, token=None, private=None):
        self.hub_model_id, self.push_in_progress = "somebody/something", None


def push(kind, folder, run):
    """A case for a world: train with a hub that writes down, and return what it was given."""
    hub, done = Hub(), mock.patch.object(transformers.trainer.PushInProgress, "is_done", return_value=True)
    with mock.patch.object(transformers.trainer, "hf_api", return_value=hub), done:
        train(kind, folder, run)
    return hub.given


def test_the_hub_is_given_whole_checkpoints_under_their_final_name(world1, world2, tmp_path):
    run = replace(changed(SAVING, push_to_hub=True, hub_strategy="all_checkpoints", save_steps=2), mixin=OwnHub)
    theirs = world1.run(push, "stock", str(tmp_path / "stock"), run)[0]
    given, nothing = world2.run(push, "ours", str(tmp_path / "ours"), replace(run, ftkit=SHARDED))
    assert nothing == []
    assert [name for name, _ in given[1:]] == [name for name, _ in theirs[1:]] == ["checkpoint-2"]
    assert "model.safetensors" in given[0][1]
    assert {"model.safetensors", "ftkit", "config.json", "scheduler.pt"} <= set(given[1][1])
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")


# --- streams that end unevenly


class UnevenStream(torch.utils.data.IterableDataset):
    """A stream that has already been split among the ranks, badly."""

    def __iter__(self):
        return iter(runs.token_rows(24 - 6 * runs.rank()))


class OwnLoader:
    """A user who makes the loader, and splits the data among ranks."""

    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(UnevenStream(), batch_size=3)


def test_ranks_that_run_out_of_batches_at_different_steps_are_told(world2, tmp_path):
    run = replace(changed(SHORT, max_steps=8), mixin=OwnLoader, ftkit=SHARDED)
    words = world2.run(refusal_of, train, "ours", str(tmp_path), run)
    assert "batches" in words[0]
    assert words[0] == words[1]
