"""What a run saves is whole: every buffer and adapter is there, a resumed run goes on bit for bit, errors leave no half.

Adapters are compared with the file that the stock Trainer writes.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from huggingface_hub import PyTorchModelHubMixin
from peft import LoraConfig, RandLoraConfig, VBLoRAConfig, VeraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainingArguments

import ftkit
from ftkit.errors import UserError
from ftkit.hf.save.model import save_arguments
from ftkit.hf.trainer.checkpoints import check_folder, complete, load_scheduler
from tests.hf import runs
from tests.hf.runs import Run

SAVING = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1}
SHARDED = {"stage": 3}


def small() -> Any:
    """Return a Llama of one block."""
    return runs.llama(num_hidden_layers=1)


# --- a run that ends early


def run_of(callbacks: list[Any], **changes: Any) -> Run:
    """Return a run that saves each step."""
    return Run(model=small, rows=24, arguments=SAVING, options={"callbacks": callbacks}, ftkit=SHARDED, **changes)


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


class Unwritable(TrainerCallback):
    """A callback that puts something into rank 0's state that JSON cannot hold."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Change the state of rank 0."""
        if runs.rank() == 0:
            state.best_metric = object()


def failed_on_rank_0(folder: str) -> str:
    """Train until the checkpoint fails, and return the class of the error."""
    trainer = runs.make_trainer("ours", folder, run_of([Unwritable()]))
    with pytest.raises(Exception) as raised:
        trainer.train()
    return raised.type.__name__


def test_an_error_that_would_fail_each_save_ends_all_ranks(world2, tmp_path):
    assert world2.run(failed_on_rank_0, str(tmp_path)) == ["TypeError", "UserError"]


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()])
def test_a_checkpoint_is_finished_when_an_error_ends_the_run(error, world1, tmp_path):
    assert world1.run(ended_early, str(tmp_path), error) == [["checkpoint-1", "checkpoint-2"]]


# --- callbacks and files


class Notes(TrainerCallback):
    """A callback that adds a file to each checkpoint."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write beside the files of the Trainer, which are complete."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        check_folder(folder)
        (folder / "note.txt").write_text("mine")


def resumed_beside_a_note(folder: str) -> str:
    """Resume from a checkpoint with a callback's file, then from one in which a file was changed; return the refusal."""
    trainer = runs.make_trainer("ours", folder, run_of([Notes()]))
    trainer.train()
    (Path(folder) / "checkpoint-1" / "note.txt").write_text("changed")
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    assert trainer.state.global_step == 3
    (Path(folder) / "checkpoint-1" / "config.json").write_text("{}")
    with pytest.raises(UserError) as refused:
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    return str(refused.value)


def test_a_callbacks_file_is_no_part_of_a_checkpoint_and_a_changed_file_is_named(world1, tmp_path):
    [said] = world1.run(resumed_beside_a_note, str(tmp_path))
    assert "checkpoint-1/config.json" in said


def saved_with_a_bad_config(folder: str) -> str:
    """Train with a generation config that transformers does not write; return what was raised."""
    trainer = runs.make_trainer("ours", folder, run_of([]))
    with mock.patch.object(transformers.GenerationConfig, "save_pretrained", side_effect=ValueError("temperature")):
        try:
            trainer.train()
        except (UserError, ValueError) as error:
            return f"{error} at step {trainer.state.global_step}"
    return "nothing was raised"


def test_a_generation_config_that_cannot_be_written_stops_the_run_before_its_first_step(world2, tmp_path):
    for said in world2.run(saved_with_a_bad_config, str(tmp_path)):
        assert said.endswith("its configuration cannot be saved (temperature) at step 0")
    assert not list(tmp_path.iterdir())


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
    "vera without projections": (small, VeraConfig(r=4, save_projection=False, **PLACES)),
    "randlora": (small, RandLoraConfig(r=4, **PLACES)),
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


# --- mixtures of experts


def mixtral() -> Any:
    """Return a small mixture of experts, whose weights transformers merges on load."""
    fields = {"vocab_size": runs.VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 64}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**fields))


def mixtral_with_lora() -> Any:
    """Return it with an adapter on its attention."""
    return get_peft_model(mixtral(), LoraConfig(r=2, **PLACES))


def saves_a_mixture(folder: str) -> None:
    """Train its adapter and save it."""
    trainer = runs.make_trainer("ours", folder, Run(model=mixtral_with_lora, rows=24, arguments=SAVING, ftkit=SHARDED))
    trainer.train()
    trainer.save_model(f"{folder}/out")


def test_an_adapter_of_a_mixture_is_saved(world1, tmp_path):
    world1.run(saves_a_mixture, str(tmp_path))
    assert load_file(tmp_path / "out" / "adapter_model.safetensors")


# --- refused when the model is saved


@pytest.mark.parametrize("adapted", [False, True])
def test_a_refused_save_writes_no_file(adapted, tmp_path):
    model = small()
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])) if adapted else model
    with torch.no_grad():
        next(value for value in model.parameters() if value.requires_grad).fill_(1e6)
    units = ftkit.shard(model, {"affinity": False})
    with pytest.raises(UserError, match="holds an infinite value in float16: such a model is not written"):
        ftkit.save_model(units, tmp_path / "out", dtype="fp16")
    assert not list((tmp_path / "out").glob("*"))


def test_what_cannot_be_saved_is_refused_before_training(tmp_path):
    """transformers would refuse such a generation configuration at the first checkpoint."""

    def invalid() -> Any:
        model = small()
        model.generation_config.temperature = 0.5  # without do_sample
        return model

    def adapted() -> Any:
        model = small()
        model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
        return model

    refused = {invalid: "its configuration cannot be saved", adapted: "has an adapter inside", mixtral: "is cut or merged"}
    for model, words in refused.items():
        run = Run(model=model, rows=24, arguments=SAVING, ftkit={**SHARDED, "affinity": False})
        trainer = runs.make_trainer("ours", str(tmp_path), run)
        with pytest.raises(UserError, match=words):
            trainer.train()


# --- save_pretrained of a sharded model


def saved_after_an_update(folder: str, stage: int) -> bool:
    """Save a model and its backbone by their own methods, while updates are deferred."""
    model = small()
    units = ftkit.shard(model, {"stage": stage, "update": "deferred", "state": "host", "affinity": False, "dtype": "bf16"})
    optimizer = ftkit.ShardedAdamW(units, lr=0.1)
    rows = torch.arange(3, 9)[None]
    model(input_ids=rows, labels=rows).loss.backward()
    optimizer.step()
    if stage:  # a rank lacks the other's part of the update
        for module in (model.model, model):
            with pytest.raises(UserError, match="updates are deferred"):
                module.save_pretrained(folder)
        return True
    for part, module in (("backbone", model.model), ("model", model)):
        module.save_pretrained(f"{folder}/{part}")
    now = units.state_dict()
    return units.comm.rank > 0 or all(  # transformers writes on rank 0 alone
        torch.equal(tensor, now[prefix + name])
        for part, prefix in (("backbone", "model."), ("model", ""))
        for name, tensor in load_file(f"{folder}/{part}/model.safetensors").items()
    )


@pytest.mark.parametrize("stage", [0, 2])
def test_save_pretrained_never_writes_weights_of_before_the_update(stage, world2, tmp_path):
    assert world2.run(saved_after_an_update, str(tmp_path), stage) == [True, True]


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


def test_a_block_that_is_registered_twice_is_saved_under_both_names(tmp_path):
    model = runs.llama(num_hidden_layers=2).eval()
    one_block_twice(model)
    rows = torch.arange(3, 9)[None]
    with torch.no_grad():
        before = model(input_ids=rows, use_cache=False).logits
    names = model.state_dict().keys()
    ftkit.save_model(ftkit.shard(model, {**SHARDED, "affinity": False}), tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == names
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=rows, use_cache=False).logits, before)


class Shared(nn.Module, PyTorchModelHubMixin):
    """A model of somebody's own that the hub's mixin saves and loads."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x)[:, 0] - labels).square().mean()}


def test_a_model_with_the_hubs_mixin_is_saved_as_by_stock(tmp_path):
    rows = [{"x": torch.full((8,), 0.1 * n), "labels": float(n)} for n in range(8)]
    for module in (ftkit, transformers):
        torch.manual_seed(1)
        options = {"max_steps": 2, "save_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True}
        place = tmp_path / module.__name__
        trainer = module.Trainer(Shared(), module.TrainingArguments(str(place), **options), train_dataset=rows)
        trainer.train()
        trainer.save_model()
    ours, stocks = (load_file(tmp_path / name / "model.safetensors") for name in ("ftkit", "transformers"))
    assert ours.keys() == stocks.keys()
    assert all(torch.allclose(ours[key], stocks[key], atol=1e-6) for key in stocks)


# --- resumed bit for bit


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class OddNames(nn.Module):
    """Blocks whose names contain characters that a file name cannot have."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.head = nn.Embedding(97, 16), nn.Linear(16, 97)
        self.blocks = nn.ModuleDict({"enc/1": Block(), "enc%2F1": Block()})

    def forward(self, input_ids: Any, labels: Any = None, attention_mask: Any = None) -> dict[str, Any]:
        x = self.table(input_ids)
        for block in self.blocks.values():
            x = block(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def vector_bank() -> Any:
    config = VBLoRAConfig(r=2, num_vectors=8, vector_length=8, topk=2, target_modules=["q_proj", "v_proj"])
    return get_peft_model(small(), config)


SAVED = {
    "odd names": Run(model=OddNames),
    "a bank of vectors that layers share": Run(model=vector_bank),
}


@pytest.mark.parametrize("name", SAVED)
def test_what_can_be_saved_goes_on_bit_for_bit(name, tmp_path):
    arguments = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    run = replace(SAVED[name], rows=12, arguments=arguments, ftkit={"stage": 3, "affinity": False})
    whole = runs.train("ours", str(tmp_path), run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2"]
    again = runs.train("ours", str(tmp_path), replace(run, resume=str(tmp_path / "checkpoint-1")))
    assert all(torch.equal(tensor, again.weights[key]) for key, tensor in whole.weights.items())
    assert whole.column("loss")[1] == again.column("loss")[1]


def test_an_adapter_of_shared_vectors_is_saved_as_peft_saves_it(tmp_path):
    model = vector_bank()
    model.save_pretrained(tmp_path / "theirs")
    ftkit.save_model(ftkit.shard(model, {"stage": 3, "affinity": False}), tmp_path / "ours")
    ours, theirs = (load_file(tmp_path / kind / "adapter_model.safetensors") for kind in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_a_checkpoint_is_not_written_through_a_link(tmp_path):
    folder, final, other = tmp_path / "new", tmp_path / "checkpoint-2", tmp_path / "elsewhere"
    folder.mkdir()
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    final.symlink_to(other)
    complete(folder, final)
    assert (other / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "elsewhere"]
    assert not final.is_symlink()


def test_a_publication_that_was_broken_off_goes_on(tmp_path):
    folder, final = tmp_path / "new", tmp_path / "checkpoint-2"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    broken = mock.patch("ftkit.hf.trainer.checkpoints.sync_tree", side_effect=KeyboardInterrupt)
    with broken, pytest.raises(KeyboardInterrupt):
        complete(folder, final)
    complete(folder, final)
    assert (final / "a.txt").read_text() == "a"


class Decays:
    """A rule of a schedule that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.9**self.calls


def test_a_rule_with_a_state_is_not_called_by_a_resume(tmp_path):
    def made() -> LambdaLR:
        return LambdaLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), Decays())

    first, second = made(), made()
    first.optimizer.step()
    first.step()
    torch.save(first.state_dict(), tmp_path / "scheduler.pt")
    load_scheduler(tmp_path / "scheduler.pt", second)
    assert second.lr_lambdas[0].calls == first.lr_lambdas[0].calls == 2
    assert second.get_last_lr() == first.get_last_lr()


def test_arguments_that_cannot_be_pickled_cost_no_checkpoint(caplog, tmp_path):
    arguments = TrainingArguments(str(tmp_path))
    arguments.mine = lambda: None
    save_arguments(arguments, tmp_path)
    assert "cannot be pickled" in caplog.text
    assert not list(tmp_path.glob("training_args*"))


def test_a_model_is_saved_in_a_dtype_by_its_name(tmp_path):
    units = ftkit.shard(small())
    ftkit.save_model(units, tmp_path / "a", dtype="bf16")
    assert ftkit.load_model(tmp_path / "a").config.dtype == torch.bfloat16
    with pytest.raises(UserError, match="dtype is 'bf15'"):
        ftkit.save_model(units, tmp_path / "b", dtype="bf15")
