"""A run goes on, and an adapter is merged, on the base that was trained on, or not at all.

Changed are weights and configuration of the base, the adapter's own settings, and weights in memory. A base that was moved,
copied or cut into other files goes on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

import ftkit
from ftkit.engine.checkpoint.weight_sums import placed_sum
from ftkit.errors import UserError
from ftkit.hf.trainer import run_checkpoints
from ftkit.hf.weights.base_digest import BASE_FILE, check_base, digests_of, note_of
from ftkit.hf.weights.merging import merge_adapter
from tests.hf import runs
from tests.hf.runs import Run


def small() -> Any:
    """Return a Llama of two blocks."""
    return runs.llama(num_hidden_layers=2)


def weight(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    """Return what changes a tensor of a folder."""

    def apply(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, path, metadata={"format": "pt"})

    return apply


def field(name: str, value: Any, *inside: str) -> Callable[[Path], None]:
    """Return what changes a field of a folder's config.json."""

    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        part = config
        for key in inside:
            part = part[key]
        part[name] = value
        (folder / "config.json").write_text(json.dumps(config))

    return apply


def moved(folder: Path) -> None:
    """Cut the weights into other files, and change what does not matter."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert not (folder / "model.safetensors").exists()
    field("use_cache", False)(folder)


CHANGES: dict[str, tuple[Callable[[Path], None], str | None]] = {
    "a norm": (weight("model.norm.weight", lambda tensor: tensor * 1.01), "model.norm.weight"),
    "rows that changed places": (
        weight("model.layers.1.self_attn.q_proj.weight", lambda tensor: tensor.flip(0)),
        "model.layers.1.self_attn.q_proj.weight",
    ),
    "eps": (field("rms_norm_eps", 1e-2), "rms_norm_eps"),
    "the base of rope": (field("rope_theta", 500.0, "rope_parameters"), "rope_theta"),
    "the kind of rope": (field("rope_parameters", {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), "rope_type"),
    "the activation": (field("hidden_act", "relu"), "hidden_act"),
    "nothing that matters": (moved, None),
}
KINDS = ("load_model", "from_pretrained", "load_model and adapter", "from_pretrained and adapter")


def adapter(**changes: Any) -> LoraConfig:
    """Return a small adapter."""
    fields = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**fields, **changes})


@dataclass(frozen=True)
class Opened:
    """Opens a folder the way a script does."""

    kind: str
    folder: str

    def __call__(self) -> Any:
        added = adapter() if "adapter" in self.kind else None
        if self.kind.startswith("load_model"):
            return ftkit.load_model(self.folder, adapter=added)
        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder)
        return get_peft_model(model, added) if added is not None else model


def trainer_of(folder: str, model: Callable[[], Any], steps: int = 2) -> Any:
    """Return a trainer that saves each step."""
    arguments = {"max_steps": steps, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1}
    return runs.make_trainer("ours", folder, Run(model=model, rows=12, arguments=arguments, ftkit={"stage": 3}))


def went_on(folder: str, model: Callable[[], Any]) -> str:
    """Resume a run, and return the refusal, or that there was none."""
    trainer = trainer_of(folder, model)
    try:
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    except UserError as error:
        return f"step {trainer.state.global_step}: {error}"
    return "went on"


def table(folder: str, kind: str) -> dict[str, str]:
    """Train on a base, and resume on each changed one."""
    base = Path(folder, "base")
    small().save_pretrained(base)
    trainer_of(f"{folder}/run", Opened(kind, str(base))).train()
    told = {}
    for number, (name, (change, _)) in enumerate(CHANGES.items()):
        other = Path(folder, f"other{number}")
        shutil.copytree(base, other)
        change(other)
        told[name] = went_on(f"{folder}/run", Opened(kind, str(other)))
    return told


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_base_is_refused_on_resume(kind, world1, tmp_path):
    [told] = world1.run(table, str(tmp_path), kind)
    for name, (_, named) in CHANGES.items():
        assert named is None or named in told[name], f"{name}: {told[name]}"
        assert (told[name] == "went on") == (named is None), f"{name}: {told[name]}"


def on_two_ranks(folder: str) -> list[str]:
    """Resume an adapter's run whose frozen weights were changed in memory, on ranks and not by the folder."""
    run = f"{folder}/run"
    trainer_of(run, lambda: get_peft_model(small(), adapter())).train()

    def changed(**changes: Any) -> Any:
        model = small()
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[-1, -1] += 0.5
        return get_peft_model(model, adapter(**changes))

    return [
        went_on(run, lambda: get_peft_model(small(), adapter())),
        went_on(run, changed),
        went_on(run, lambda: get_peft_model(small(), adapter(lora_alpha=64))),
        went_on(run, lambda: get_peft_model(small(), adapter(use_rslora=True))),
    ]


def test_one_changed_element_in_memory_and_a_changed_scale_are_refused(world2, tmp_path):
    same, element, scale, stabilised = world2.run(on_two_ranks, str(tmp_path))[0]
    assert same == "went on"
    assert "layers.1.mlp.up_proj" in element
    assert "lora_alpha: 8 then, 64 now" in scale
    assert "use_rslora" in stabilised


def in_another_dtype(folder: str) -> dict[str, str]:
    """Resume an adapter's run in its own dtype and in bf16; return what the log says of frozen weights."""
    run = f"{folder}/run"
    trainer_of(run, lambda: get_peft_model(small(), adapter())).train()
    said = {}
    for dtype in ("fp32", "bf16"):
        arguments = {"max_steps": 2, "save_strategy": "no"}
        settings = {"stage": 3, "dtype": dtype}
        resumed = Run(model=lambda: get_peft_model(small(), adapter()), rows=12, arguments=arguments, ftkit=settings)
        with mock.patch.object(run_checkpoints.logger, "warning") as warned:
            runs.make_trainer("ours", f"{folder}/{dtype}", resumed).train(resume_from_checkpoint=f"{run}/checkpoint-1")
        said[dtype] = " ".join(str(call.args[0] % call.args[1:]) for call in warned.call_args_list)
    return said


def test_frozen_weights_in_another_dtype_are_said_not_to_be_compared(world1, tmp_path):
    [said] = world1.run(in_another_dtype, str(tmp_path))
    assert "not compared" not in said["fp32"]
    assert "the frozen weights of" in said["bf16"]
    assert "were not compared with this run's" in said["bf16"]


def bases_by_turns(folder: str) -> list[str]:
    """Train twice with a Trainer that makes another base each time; resume the second run on either."""
    made: list[int] = []

    def base() -> Any:
        made.append(1)
        model = small()
        with torch.no_grad():
            model.model.norm.weight.mul_(len(made))
        return get_peft_model(model, adapter())

    arguments = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = runs.make_trainer("ours", folder, Run(rows=12, arguments=arguments, options={"model_init": base}))
    trainer.train()
    second = len(made)
    trainer.train()
    told = []
    for before in (second - 1, second):
        made[:] = [1] * before
        told.append(went_on(folder, base))
    return told


def test_the_base_is_that_of_the_model_that_is_trained(world1, tmp_path):
    [(first, second)] = world1.run(bases_by_turns, str(tmp_path))
    assert "norm.weight" in first
    assert second == "went on"


def on_other_ranks(folder: str) -> str:
    """Resume that run on this world."""
    return went_on(f"{folder}/run", lambda: get_peft_model(small(), adapter()))


def test_other_numbers_of_ranks_have_the_same_sums(world1, world2, tmp_path):
    world2.run(on_two_ranks, str(tmp_path))
    assert world1.run(on_other_ranks, str(tmp_path)) == ["went on"]


def test_sums_add_up_however_a_tensor_is_cut():
    values = torch.randn(20_000).to(torch.bfloat16)
    whole = placed_sum(values, 0)
    assert whole == placed_sum(values[:7001], 0) + placed_sum(values[7001:], 7001)
    assert whole != placed_sum(values.flip(0), 0)


def trained(folder: str) -> None:
    """Train an adapter and save it."""
    base = Path(folder, "base")
    small().save_pretrained(base)
    trainer = trainer_of(f"{folder}/run", Opened("load_model and adapter", str(base)))
    trainer.model.config.pad_token_id = 3  # as a Trainer does with a tokenizer's
    trainer.train()
    trainer.save_model(f"{folder}/adapter")


@pytest.mark.parametrize("source", ["adapter", "run/checkpoint-2"])
def test_an_adapter_is_not_merged_onto_a_changed_base(source, world1, tmp_path):
    world1.run(trained, str(tmp_path))
    for number, (name, (change, named)) in enumerate(CHANGES.items()):
        other, out = tmp_path / f"other{number}", tmp_path / f"out{number}"
        shutil.copytree(tmp_path / "base", other)
        change(other)
        if named is None:
            merge_adapter(tmp_path / source, out, base=str(other))
            assert not (out / BASE_FILE).exists()
            continue
        with pytest.raises(UserError, match=named.replace(".", r"\.")):
            merge_adapter(tmp_path / source, out, base=str(other))
        assert not out.exists(), name


def test_an_adapter_without_a_note_is_merged(world1, tmp_path):
    world1.run(trained, str(tmp_path))
    (tmp_path / "adapter" / BASE_FILE).write_text("[1]")
    with pytest.raises(UserError, match="its note of the base is not valid"):
        merge_adapter(tmp_path / "adapter", tmp_path / "out")
    (tmp_path / "adapter" / BASE_FILE).unlink()
    merge_adapter(tmp_path / "adapter", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("noted", [3, [], {"config": 3}, {"files": {"a": {"b": 1}}, "frozen": []}])
def test_a_note_that_is_none_is_refused(noted):
    with pytest.raises(UserError):
        check_base(noted, {"config": {}, "files": {"a": "0"}}, "checkpoint-1")


def test_large_tensors_are_sampled_at_both_ends(tmp_path):
    values = torch.zeros(1 << 18)
    seen = set()
    for place in (None, 0, -1):
        changed = values.clone()
        if place is not None:
            changed[place] = 1
        save_file({"w": changed}, tmp_path / "model.safetensors")
        seen.add(digests_of([tmp_path / "model.safetensors"])["w"])
    assert len(seen) == 3


class Around(nn.Module):
    """A user's module around a model."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("change", ["a norm", "eps"])
def test_a_base_inside_a_users_module_is_compared(change, adapted, tmp_path):
    small().save_pretrained(tmp_path)

    def noted(**changes: Any) -> Any:
        model = Opened("load_model", str(tmp_path))()
        model = get_peft_model(model, adapter(**changes)) if adapted else model
        return note_of(ftkit.shard(Around(model), {"affinity": False}))

    before, apply = noted(), CHANGES[change][0]
    assert check_base(before, noted(), "a checkpoint")
    if adapted:
        with pytest.raises(UserError, match="lora_alpha"):
            check_base(before, noted(lora_alpha=64), "a checkpoint")
    apply(tmp_path)
    with pytest.raises(UserError, match=CHANGES[change][1]):
        check_base(before, noted(), "a checkpoint")


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a user's module"])
def test_a_scale_that_was_set_by_hand_is_compared(inside):
    def noted(scale: float) -> Any:
        model = get_peft_model(small(), adapter())
        model.model.model.layers[0].self_attn.q_proj.set_scale("default", scale)
        return note_of(ftkit.shard(Around(model) if inside else model, {"affinity": False}))

    before = json.loads(json.dumps(noted(1.0)))
    assert check_base(before, noted(1.0), "a checkpoint")
    words = r"the adapter's scale in \S*layers\.0\.self_attn\.q_proj\.default: 4\.0 then, 8\.0 now"
    with pytest.raises(UserError, match=words):
        check_base(before, noted(2.0), "a checkpoint")
    assert check_base({key: each for key, each in before.items() if key != "scales"}, noted(2.0), "of an earlier version")


class Taught(nn.Module):
    """A student and its frozen teacher."""

    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher

    def forward(self, **inputs: Any) -> Any:
        return self.student(**inputs)


@pytest.mark.parametrize("adapted", [False, True])
def test_every_model_of_a_users_module_is_compared(adapted):
    def noted(alpha: int = 8, **changes: Any) -> Any:
        student, teacher = small(), runs.llama(num_hidden_layers=2, **changes)
        if adapted:
            student, teacher = get_peft_model(student, adapter()), get_peft_model(teacher, adapter(lora_alpha=alpha))
        return note_of(ftkit.shard(Taught(student, teacher), {"affinity": False}))

    before = json.loads(json.dumps(noted()))
    assert check_base(before, noted(), "a checkpoint")
    with pytest.raises(UserError, match=r"the configuration of teacher\S*\.rms_norm_eps"):
        check_base(before, noted(rms_norm_eps=1e-2), "a checkpoint")
    if adapted:
        with pytest.raises(UserError, match=r"the adapter of teacher\.default\.lora_alpha"):
            check_base(before, noted(alpha=64), "a checkpoint")
    earlier = {key: value for key, value in before.items() if key not in ("configs", "adapters", "scales", "versions")}
    assert check_base(earlier, noted(rms_norm_eps=1e-2, alpha=64), "of an earlier version")


def test_a_field_of_ones_own_that_comes_or_goes_is_a_change():
    def noted(**changes: Any) -> Any:
        return note_of(ftkit.shard(runs.llama(num_hidden_layers=2, **changes), {"affinity": False}))

    plain, scaled = noted(), noted(my_scale=2.0)
    assert check_base(scaled, noted(my_scale=2.0), "a checkpoint")
    assert check_base(plain, noted(my_scale=None), "a checkpoint"), "nothing is nothing"
    with pytest.raises(UserError, match=r"config\.json's my_scale: none then, 2\.0 now"):
        check_base(plain, scaled, "a checkpoint")
    with pytest.raises(UserError, match=r"config\.json's my_scale: 2\.0 then, none now"):
        check_base(scaled, plain, "a checkpoint")
    other = {**plain, "versions": {**plain["versions"], "transformers": "5.0.0"}}
    assert check_base(other, scaled, "a checkpoint"), "the other version may not know the field"


def test_an_accelerator_refuses_another_configuration(tmp_path):
    small().save_pretrained(tmp_path)

    def prepared() -> Any:
        runs.fresh_state()
        accelerator = ftkit.Accelerator(cpu=True, ftkit={"affinity": False})
        model = Opened("load_model", str(tmp_path))()
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        return accelerator

    prepared().save_state(str(tmp_path / "state"))
    prepared().load_state(str(tmp_path / "state"))
    CHANGES["eps"][0](tmp_path)
    with pytest.raises(UserError, match="rms_norm_eps"):
        prepared().load_state(str(tmp_path / "state"))
