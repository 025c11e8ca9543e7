"""What no checkpoint could hold stops a run before its first step; what looked so and can be saved, is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import peft
import pytest
import torch
import transformers
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LambdaLR

import ftkit
from ftkit.errors import UserError
from ftkit.hf.trainer.checkpoint_files import load_scheduler
from ftkit.hf.trainer.run_checkpoints import publish
from tests.hf import runs
from tests.hf.runs import Run


def tiny(**changes: Any) -> Any:
    """Return a Llama of two narrow blocks."""
    return runs.llama(**{"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, **changes})


class Remembers(nn.Module):
    """A norm with a state that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())

    def get_extra_state(self) -> torch.Tensor:
        return self.calls

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.calls = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def with_extra_state() -> Any:
    model = tiny()
    model.model.norm = Remembers()
    return model


def with_complex_buffer() -> Any:
    model = tiny()
    model.model.norm.register_buffer("phases", torch.ones(3, dtype=torch.complex64))
    return model


def with_sparse_buffer() -> Any:
    model = tiny()
    model.model.norm.register_buffer("edges", torch.eye(3).to_sparse())
    return model


def with_invalid_generation() -> Any:
    model = tiny()
    model.generation_config.temperature = 0.3
    model.generation_config.do_sample = False
    return model


def with_object_in_config() -> Any:
    model = tiny()
    model.config.thing = object()
    return model


class Around(nn.Module):
    """A module around a model, which names its weights itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny()

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {f"mine.{name}": value for name, value in self.inner.state_dict(*args, **kwargs).items()}


class Broken:
    """A processor that cannot be saved."""

    model_input_names = ("input_ids",)

    def save_pretrained(self, folder: Path) -> None:
        raise ValueError("no template")

    def pad(self, rows: Any, **kwargs: Any) -> Any:
        return rows


def tensor_rate(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))
    return optimizer, ConstantLR(optimizer)


def with_state_hook() -> Any:
    model = tiny()
    model.model.norm.register_state_dict_post_hook(lambda module, state, prefix, metadata: state.clear())
    return model


class OwnSave(transformers.LlamaForCausalLM):
    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        super().save_pretrained(*args, **kwargs)


def with_own_save() -> Any:
    model = tiny()
    model.__class__ = OwnSave
    return model


def with_fake_quantised() -> Any:
    model = tiny()
    model.model.norm.fake = torch.ao.quantization.FakeQuantize()
    return model


REFUSED = [
    (with_extra_state, {}, r"model\.norm has extra state"),
    (with_complex_buffer, {}, r"the buffer model\.norm\.phases has dtype torch\.complex64"),
    (with_sparse_buffer, {}, r"the buffer model\.norm\.edges has layout torch\.sparse_coo"),
    (with_invalid_generation, {}, "GenerationConfig is invalid"),
    (with_object_in_config, {}, "not JSON serializable"),
    (Around, {}, r"Around has a state_dict\(\) of its own"),
    (with_state_hook, {}, r"model\.norm has with_state_hook.* as a hook of its state_dict\(\)"),
    (with_own_save, {}, r"OwnSave has a save_pretrained\(\) of its own"),
    (with_fake_quantised, {}, r"model\.norm\.fake has a _save_to_state_dict\(\) of its own"),
    (tiny, {"processing_class": Broken}, "no template"),
    (tiny, {"optimizers": tensor_rate}, "lr is a tensor"),
]


@pytest.mark.parametrize("model, options, told", REFUSED, ids=[told for _, _, told in REFUSED])
def test_what_cannot_be_saved_is_refused_before_the_first_step(model, options, told, tmp_path):
    run = Run(model=model, rows=12, options=options, arguments={"max_steps": 1, "save_strategy": "steps", "save_steps": 1})
    trainer = runs.make_trainer("ours", str(tmp_path), dataclasses.replace(run, ftkit={"affinity": False}))
    with pytest.raises(UserError, match=told):
        trainer.train()
    assert trainer.state.global_step == 0


# --- saved


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class OddNames(nn.Module):
    """Blocks under names that no file can have."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.head = nn.Embedding(97, 16), nn.Linear(16, 97)
        self.blocks = nn.ModuleDict({"enc/1": Block(), "enc%2F1": Block(), "n" * 300: Block()})

    def forward(self, input_ids: Any, labels: Any = None, attention_mask: Any = None) -> dict[str, Any]:
        x = self.table(input_ids)
        for block in self.blocks.values():
            x = block(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def vector_bank() -> Any:
    config = peft.VBLoRAConfig(r=2, num_vectors=8, vector_length=8, topk=2, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(tiny(), config)


SAVED = {
    "odd names": Run(model=OddNames),
    "a bank of vectors that layers share": Run(model=vector_bank),
}


@pytest.mark.parametrize("name", SAVED)
def test_what_can_be_saved_goes_on_bit_for_bit(name, tmp_path):
    arguments = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    run = dataclasses.replace(SAVED[name], rows=12, arguments=arguments, ftkit={"stage": 3, "affinity": False})
    whole = runs.train("ours", str(tmp_path), run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2"]
    again = runs.train("ours", str(tmp_path), dataclasses.replace(run, resume=str(tmp_path / "checkpoint-1")))
    assert all(torch.equal(tensor, again.weights[key]) for key, tensor in whole.weights.items())
    assert whole.column("loss")[1] == again.column("loss")[1]


def test_an_adapter_of_shared_vectors_is_saved_as_peft_saves_it(tmp_path):
    model = vector_bank()
    model.save_pretrained(tmp_path / "theirs")
    ftkit.save_model(ftkit.shard(model, {"stage": 3, "affinity": False}), tmp_path / "ours")
    names = [path.name for path in sorted((tmp_path / "theirs").glob("adapter*"))]
    for name in names:
        assert (tmp_path / "ours" / name).stat().st_size == (tmp_path / "theirs" / name).stat().st_size


def test_a_users_file_under_the_name_of_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "checkpoint-2").write_text("mine")
    run = Run(model=tiny, rows=12, arguments={"max_steps": 1, "save_strategy": "steps", "save_steps": 1})
    with pytest.raises(UserError, match="checkpoint-2 is there and is not a folder"):
        runs.make_trainer("ours", str(tmp_path), run).train()
    assert (tmp_path / "checkpoint-2").read_text() == "mine"


def test_what_a_link_leads_to_stays_where_it_is(tmp_path):
    folder, final, other = tmp_path / "new", tmp_path / "checkpoint-2", tmp_path / "elsewhere"
    folder.mkdir()
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    final.symlink_to(other)
    publish(folder, final)
    assert (other / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "elsewhere"]
    assert not final.is_symlink()


def test_a_publication_that_was_broken_off_goes_on(tmp_path):
    folder, final = tmp_path / "new", tmp_path / "checkpoint-2"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    broken = mock.patch("ftkit.hf.trainer.run_checkpoints.sync_tree", side_effect=KeyboardInterrupt)
    with broken, pytest.raises(KeyboardInterrupt):
        publish(folder, final)
    publish(folder, final)
    assert (final / "a.txt").read_text() == "a"
    folder.mkdir()
    (folder / "contents.json").write_text("mine")
    with pytest.raises(UserError, match=r"contents\.json, which a subclass wrote"):
        publish(folder, final)


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gradient_checkpointing_kwargs": {"use_reentrnt": False}}, "'use_reentrnt' is not read; .*'use_reentrant'"),
        ({"include_for_metrics": ["lossess"]}, "'lossess' is not read; did you mean 'loss'"),
        ({"optim": "adamw_torch", "optim_args": "beta1=0.1,foo=3"}, "'beta1' is not read. Read: none; .*adam_beta1"),
        ({"optim": "sgd", "optim_args": "momentun=0.9"}, "'momentun' is not read; did you mean 'momentum'"),
        ({"train_sampling_strategy": "group-by-length"}, "'group-by-length' is not read; .*'group_by_length'"),
        ({"train_sampling_strategy": "length"}, "train_sampling_strategy: 'length' .*Read: random, sequential, group_by_"),
        ({"include_num_input_tokens_seen": "nonpadding"}, "'nonpadding' is not read; did you mean 'non_padding'"),
        (
            {"lr_scheduler_type": "constant_with_warmup", "lr_scheduler_kwargs": {"min_lr": 1e-6}},
            r"lr_scheduler_kwargs \(with lr_scheduler_type=constant_with_warmup\): 'min_lr' .*Read: none",
        ),
        ({"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"last_epoch": 1}}, "'last_epoch' is not read"),
        ({"optim_target_modules": ["q_porj"]}, r"optim_target_modules=\['q_porj'\] is not read with optim=adamw"),
    ],
)
def test_a_name_in_the_arguments_that_nobody_reads_stops(tmp_path, arguments, words):
    run = Run(model=tiny, rows=4, arguments={"max_steps": 1, "gradient_checkpointing": True, **arguments})
    with pytest.raises(UserError, match=words):
        runs.make_trainer("ours", str(tmp_path), run)


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
@pytest.mark.parametrize("name", ["lenght", "size"])
def test_a_column_of_lengths_that_the_rows_have_not_stops(tmp_path, name, strategy):
    rows = datasets.Dataset.from_list([{"input_ids": [1, 2], "labels": [1, 2], "size": 2}] * 4)
    arguments = {"train_sampling_strategy": strategy, "length_column_name": name, "max_steps": 1}
    given = ftkit.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **arguments)
    trainer = ftkit.Trainer(model=tiny(), args=given, train_dataset=rows)
    if name == "size":
        trainer.train()
    else:
        with pytest.raises(UserError, match="length_column_name: no row has 'lenght'; There are input_ids, labels, size"):
            trainer.train()


def test_a_trainer_that_makes_its_optimizer_schedule_or_sampler_may_read_any_name(tmp_path):
    class Own(ftkit.Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            return super().create_optimizer(model)

        def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
            return super().create_scheduler(*args, **kwargs)

        def _get_train_sampler(self, *args: Any) -> Any:
            return super()._get_train_sampler(*args)

    words = {"train_sampling_strategy": "mine", "lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"mine": 1}}
    arguments = ftkit.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", optim_args="mine=1", **words)
    Own(model=tiny(), args=arguments)
    sgd = ftkit.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", optim="sgd", optim_args="momentum=0.5")
    ftkit.Trainer(model=tiny(), args=sgd)


@pytest.mark.parametrize(("name", "words"), [("lables", "no batch has 'lables'; did you mean 'labels'"), ("labels", None)])
def test_labels_that_no_batch_has_are_told(tmp_path, caplog, name, words):
    run = Run(model=tiny, rows=4, arguments={"max_steps": 1, "label_names": [name]})
    runs.make_trainer("ours", str(tmp_path), run).train()
    told = [text for text in caplog.messages if text.startswith("label_names")]
    assert len(told) == (1 if words else 0)
    assert not words or words in told[0]


@pytest.mark.parametrize("key", ["device_gib", "host_gib", "nvme_gib", "state_host_bytes"])
def test_a_truth_value_is_no_number(key):
    with pytest.raises(UserError, match=rf"{key}: found [Tt]rue, needs .*a number"):
        ftkit.TrainingArguments("runs/a", use_cpu=True, ftkit={key: True})


def test_a_model_is_saved_in_a_dtype_by_its_name(tmp_path):
    units = ftkit.shard(tiny())
    ftkit.save_model(units, tmp_path / "a", dtype="bf16")
    assert ftkit.load_model(tmp_path / "a").config.dtype == torch.bfloat16
    with pytest.raises(UserError, match="dtype is 'bf15'"):
        ftkit.save_model(units, tmp_path / "b", dtype="bf15")
