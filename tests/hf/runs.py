"""One training run described by data, so that the same run can be made by transformers' Trainer and by ours.

`train(kind, folder, run)` is a case for a world of ranks: kind "stock" takes Trainer and TrainingArguments from
transformers, kind "ours" from ftkit, and nothing else differs: the import is the one change in a user's script. The
global batch is fixed: on W ranks the batch of a rank is 1/W of it.

Models come from small configurations with weights drawn wide, so that gradients are far from rounding, and without
dropout, whose random numbers no two world sizes share. Rows are random tokens, each with its own number of labels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn

import ftkit
from tests.engine.families import determined

VOCABULARY = 97
LENGTH = 12
GLOBAL_BATCH = 6
"""Sequences of one micro-batch over all ranks; divided by 1, 2 and 3."""

TIMINGS = ("runtime", "per_second", "preparation_time", "total_flos")
"""Parts of the names of logged values that no two runs share. (Stock counts the floating-point operations of a
resharded model all the same; they are compared where they matter.)"""


def world_size() -> int:
    """Return the number of ranks of the world that runs this case."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def rank() -> int:
    """Return the number of the rank that runs this."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def fresh_state() -> None:
    """Forget the accelerators of earlier cases: accelerate keeps its state in classes."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    torch.set_num_threads(1)


# --- models


def llama(**changes: Any) -> nn.Module:
    """Return a small Llama, untied."""
    torch.manual_seed(5)
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**fields, **changes}))


def tied_llama() -> nn.Module:
    """Return the small Llama with its head tied to its embedding."""
    return llama(tie_word_embeddings=True)


SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(kind: str, **changes: Any) -> nn.Module:
    """Return a small BERT of a class of transformers."""
    torch.manual_seed(6)
    return getattr(transformers, kind)(transformers.BertConfig(**{**SMALL, **QUIET, **changes}))


def classifier() -> nn.Module:
    """Return a small BERT classifier of three labels: its loss is a mean over the rows of a batch."""
    return bert("BertForSequenceClassification", num_labels=3)


def small_t5(**changes: Any) -> nn.Module:
    """Return a small T5."""
    torch.manual_seed(7)
    fields = {
        "vocab_size": VOCABULARY,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 1,
        "num_decoder_layers": 2,
        "num_heads": 2,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    }
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**{**fields, **changes}))


def t5() -> nn.Module:
    """Return a small T5, drawn so wide that what it generates differs and ends at different lengths."""
    model = small_t5(d_model=32, d_ff=56, num_layers=2, num_heads=4, eos_token_id=84)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    return model


# --- data


def token_rows(count: int, *, seed: int = 1, length: int = LENGTH) -> list[dict[str, Tensor]]:
    """Return rows of random tokens, each with its own number of labels (one at least)."""
    random = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        ids = torch.randint(3, VOCABULARY, (length,), generator=random)
        hidden = int(torch.randint(1, length - 1, (1,), generator=random))
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()})
        rows[-1]["labels"][:hidden] = -100
    return rows


def rows_with(count: int, make: Callable[[Tensor, torch.Generator], dict[str, Tensor]], seed: int) -> list[Any]:
    """Return rows of random tokens, with what `make` makes of each."""
    random = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=random)
        rows.append({"input_ids": ids, **make(ids, random)})
    return rows


def labelled_rows(count: int, *, seed: int = 2) -> list[dict[str, Tensor]]:
    """Return rows of random tokens with one of three labels."""
    return rows_with(count, lambda ids, random: {"labels": torch.randint(0, 3, (), generator=random)}, seed)


# --- a run


@dataclass(frozen=True)
class Run:
    """One run of a Trainer.

    Args:
        model: makes it. rows, eval_rows: the data.
        arguments: of TrainingArguments, beside `COMMON`. options: of the Trainer; `optimizers` is called with the
        model, `processing_class` and `ref_model` with nothing.
        mixin: a user's subclass over the Trainer class. stock_classes, our_classes: Trainer and arguments of either kind.
        ftkit: engine settings of ours; "default" leaves the field alone.
        resume: folder for `resume_from_checkpoint`.
        before, after: called with the trainer around train(); what they return is in the outcome.
    """

    model: Callable[[], nn.Module] = llama
    rows: Callable[[], Any] | int = 40
    eval_rows: Callable[[], list[dict[str, Tensor]]] | int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    mixin: type | None = None
    stock_classes: tuple[type, type] = (transformers.Trainer, transformers.TrainingArguments)
    our_classes: tuple[type, type] = (ftkit.Trainer, ftkit.TrainingArguments)
    ftkit: Any = "default"
    resume: str | bool | None = None
    before: Callable[[Any], Any] | None = None
    after: Callable[[Any], Any] | None = None
    batch: int = GLOBAL_BATCH


@dataclass
class Outcome:
    """What a run did, as one rank saw it. `weights` are of rank 0 only."""

    history: list[dict[str, Any]]
    weights: dict[str, Tensor]
    before: Any = None
    after: Any = None

    def column(self, name: str) -> list[Any]:
        """Return the logged values of one name, in order."""
        return [line[name] for line in self.history if name in line]


COMMON: dict[str, Any] = {
    "use_cpu": True,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "num_train_epochs": 1,
    "dataloader_pin_memory": False,
}


def classes(kind: str, run: Run) -> tuple[type, type]:
    """Return Trainer and TrainingArguments of a kind: what a user's script imports."""
    trainer, arguments = run.stock_classes if kind == "stock" else run.our_classes
    return (trainer if run.mixin is None else type("UserTrainer", (run.mixin, trainer), {})), arguments


def make_arguments(kind: str, folder: str, run: Run) -> Any:
    """Return the TrainingArguments of a run on this world."""
    world = world_size()
    fields = {**COMMON, **({"ddp_backend": "gloo"} if world > 1 else {}), **run.arguments}
    fields.setdefault("per_device_train_batch_size", run.batch // world)
    fields.setdefault("per_device_eval_batch_size", run.batch // world)
    if kind == "ours" and run.ftkit != "default":
        fields["ftkit"] = run.ftkit
    return classes(kind, run)[1](folder, **fields)


def make_trainer(kind: str, folder: str, run: Run) -> Any:
    """Return the Trainer of a run on this world."""
    fresh_state()
    arguments = make_arguments(kind, folder, run)
    arguments.device  # noqa: B018  (accelerate sets the number of threads here)
    torch.set_num_threads(1)
    options = dict(run.options)
    if "model_init" not in options:
        options["model"] = run.model()
    if "optimizers" in options:
        options["optimizers"] = options["optimizers"](options["model"])
    options |= {key: options[key]() for key in ("processing_class", "ref_model") if key in options}
    rows = token_rows(run.rows) if isinstance(run.rows, int) else run.rows()
    if run.eval_rows:
        options["eval_dataset"] = token_rows(run.eval_rows, seed=9) if isinstance(run.eval_rows, int) else run.eval_rows()
    trainer = classes(kind, run)[0](args=arguments, train_dataset=rows, **options)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def weights_of(trainer: Any) -> dict[str, Tensor]:
    """Return the trained weights, whole; of the adapter and what trains beside it where there is one. A collective."""
    units = getattr(trainer, "units", None)
    if units is not None:
        return units.state_dict()
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def train(kind: str, folder: str, run: Run) -> Outcome:
    """Make a run and say what it did."""
    trainer = make_trainer(kind, folder, run)
    before = run.before(trainer) if run.before else None
    trainer.train(resume_from_checkpoint=run.resume)
    after = run.after(trainer) if run.after else None
    weights = weights_of(trainer)
    return Outcome(trainer.state.log_history, weights if rank() == 0 else {}, before, after)


# --- comparisons


def close(one: Any, two: Any, relative: float = 1e-5, absolute: float = 1e-6) -> bool:
    """Return whether two logged values are the same up to rounding; a NaN is like nothing."""
    if isinstance(one, float) and isinstance(two, (int, float)) and one != two:
        return abs(one - two) <= absolute + relative * max(abs(one), abs(two))
    return bool(one == two)


def comparable(history: Sequence[Mapping[str, Any]], *, leave_out: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return a log history without what no two runs share."""
    hidden = (*TIMINGS, *leave_out)
    return [{k: v for k, v in line.items() if not any(word in k for word in hidden)} for line in history]


def assert_same_history(
    ours: Outcome, theirs: Outcome, *, relative: float = 1e-5, absolute: float = 1e-6, leave_out: Sequence[str] = ()
) -> None:
    """Compare two log histories, line by line and value by value."""
    one, two = (comparable(o.history, leave_out=leave_out) for o in (ours, theirs))
    assert [sorted(line) for line in one] == [sorted(line) for line in two]
    wrong = [
        f"line {number} (step {line['step']}): {key} is {value!r}, {other[key]!r} in stock"
        for number, (line, other) in enumerate(zip(one, two))
        for key, value in line.items()
        if not close(value, other[key], relative, absolute)
    ]
    assert not wrong, "\n".join(wrong[:20])


def assert_same_weights(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], *, limit: float = 1e-4) -> None:
    """Compare weights, each tensor by the norm of its difference; names must agree.

    Key biases are left out: their gradient is rounding, and Adam makes whole steps of it.
    """
    assert sorted(ours) == sorted(theirs)
    wrong = {}
    for name, tensor in ours.items():
        one, two = determined(name, tensor.float()), determined(name, theirs[name].float())
        if one is not None and not (part := float((one - two).norm() / two.norm().clamp(min=1e-6))) <= limit:
            wrong[name] = part
    assert not wrong, wrong


def files_in(folder: str | os.PathLike[str]) -> list[str]:
    """Return the paths of all files under a folder, relative to it."""
    root = Path(folder)
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
