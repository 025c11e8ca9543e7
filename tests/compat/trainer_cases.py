"""Cases of the Trainer: its arguments, its data, its callbacks, its checkpoints, its evaluation.

A `Plan` describes one training; `trained` makes it with either kind of classes. The models are tiny: a Llama of three
blocks, and two scalars without any block, as the Trainer's own tests use.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import datasets
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import ftkit
from tests.compat.case import Case, names_in
from tests.hf.runs import comparable, llama, token_rows

BATCH, ROWS = 4, 24


class Regression(nn.Module):
    """y = a x + b with two scalars; outputs a tuple, a dictionary, or two predictions."""

    def __init__(self, form: str = "tuple") -> None:
        super().__init__()
        self.a, self.b, self.form = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(-1.0)), form

    def forward(self, x: Tensor, labels: Tensor | None = None, labels_2: Tensor | None = None) -> Any:
        y = self.a * x + self.b
        outputs = (y, y + 1) if self.form == "double" else (y,)
        if labels is None:
            return outputs
        loss = nn.functional.mse_loss(y, labels)
        if labels_2 is not None:
            loss = loss + nn.functional.mse_loss(y, labels_2)
        return {"loss": loss, "output": y} if self.form == "dict" else (loss, *outputs)


def points(count: int = 64, *, second: bool = False) -> list[dict[str, Tensor]]:
    """Return points on a line with noise."""
    random = torch.Generator().manual_seed(7)
    rows = []
    for x in torch.randn(count, generator=random):
        rows.append({"x": x, "labels": 2 * x + 3 + 0.1 * torch.randn((), generator=random)})
        if second:
            rows[-1]["labels_2"] = rows[-1]["labels"] + 1
    return rows


def ragged(count: int = ROWS) -> list[dict[str, list[int]]]:
    """Return rows of different lengths."""
    return [
        {"input_ids": row["input_ids"][: 4 + n % 7].tolist(), "labels": row["input_ids"][: 4 + n % 7].tolist()}
        for n, row in enumerate(token_rows(count))
    ]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Pad a batch on the right."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    labels = torch.tensor([row["labels"] + [-100] * (width - len(row["labels"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}


class Stream(torch.utils.data.IterableDataset):
    """Rows without a length."""

    def __iter__(self) -> Any:
        return iter(token_rows(ROWS))


def plain_rows() -> list[dict[str, Tensor]]:
    """Return rows of one length."""
    return token_rows(ROWS)


@dataclass(frozen=True)
class Plan:
    """One training.

    Args:
        arguments: of TrainingArguments.
        model: makes the model; None where `model_init` does.
        rows: of training, made anew.
        held_out: of evaluation; None: there are none.
        options: of the Trainer; a callable under `optimizers` or `callbacks` is called with the model.
        mixin: a user's subclass.
        act: what is done with the trainer; returns more evidence. None trains.
        strip: parts of logged names that are not compared.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] | None = llama
    rows: Callable[[], Any] = plain_rows
    held_out: Callable[[], Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    mixin: type | None = None
    act: Callable[[Any], Mapping[str, Any] | None] | None = None
    strip: tuple[str, ...] = ()


def package(kind: str) -> Any:
    """Return the module that a script imports its classes from."""
    return transformers if kind == "stock" else ftkit


def built(plan: Plan, kind: str, folder: str, **changes: Any) -> Any:
    """Return the trainer of a plan."""
    fields = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": BATCH,
        "logging_steps": 1,
        "per_device_eval_batch_size": BATCH,
        "learning_rate": 3e-3,
        "save_strategy": "no",
        "max_grad_norm": 0.5,
        "num_train_epochs": 1,
        "dataloader_pin_memory": False,
        **plan.arguments,
        **changes,
    }
    trainer_class = package(kind).Trainer
    if plan.mixin is not None:
        trainer_class = type("UserTrainer", (plan.mixin, trainer_class), {})
    model = plan.model() if plan.model is not None else None
    options = {key: value(model) if key in ("optimizers", "callbacks") else value for key, value in plan.options.items()}
    options = {key: value() if isinstance(value, type) else value for key, value in options.items()}
    if plan.held_out is not None:
        options["eval_dataset"] = plan.held_out()
    arguments = package(kind).TrainingArguments(folder, **fields)
    trainer = trainer_class(model=model, args=arguments, train_dataset=plan.rows(), **options)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def state_of(trainer: Any) -> Mapping[str, Tensor]:
    """Return the weights, whole."""
    units = getattr(trainer, "units", None)
    return (
        units.state_dict() if units is not None else {k: v.detach().clone() for k, v in trainer.model.state_dict().items()}
    )


def evidence_of(trainer: Any, plan: Plan, folder: str) -> dict[str, Any]:
    """Return logs, counts, files and weights."""
    state = trainer.state
    return {
        "log": comparable(state.log_history, leave_out=("preparation", "mem_", *plan.strip)),
        "counts": [state.global_step, state.max_steps, state.num_train_epochs, state.epoch, state.best_metric],
        "best": str(state.best_model_checkpoint or "").removeprefix(folder),
        "checkpoints": names_in(folder),
        "weights": dict(state_of(trainer)),
    }


def trained(plan: Plan, kind: str, folder: str) -> dict[str, Any]:
    """Train as the plan says and return what came of it."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = built(plan, kind, folder)
            more = plan.act(trainer) if plan.act is not None else trainer.train() and None
            return {**evidence_of(trainer, plan, folder), "more": dict(more or {})}
    finally:
        logging.disable(logging.NOTSET)


def case(group: str, feature: str, *, differs: str = "", raises: bool = False, **plan: Any) -> Case:
    """Return the case of a plan."""
    return Case(group, feature, partial(trained, Plan(**plan)), differs, raises)


def arguments(group: str, *fields: Mapping[str, Any], differs: str = "", **plan: Any) -> list[Case]:
    """Return a case for each set of arguments, named after them."""
    return [
        case(
            group, ", ".join(f"{key}={shown(value)}" for key, value in each.items()), arguments=each, differs=differs, **plan
        )
        for each in fields
    ]


def shown(value: Any) -> str:
    """Return a value as a reader writes it."""
    return repr(value) if not callable(value) else value.__name__


# --- what is done with a trainer


def evaluates(trainer: Any) -> dict[str, Any]:
    """Evaluate before and after training."""
    before = trainer.evaluate()
    trainer.train()
    return {"before": quiet(before), "after": quiet(trainer.evaluate())}


def predicts(trainer: Any) -> dict[str, Any]:
    """Predict without training."""
    found = trainer.predict(trainer.eval_dataset)
    several = isinstance(found.predictions, tuple)
    predictions = found.predictions if several else (found.predictions,)
    labels = found.label_ids if isinstance(found.label_ids, tuple) else (found.label_ids,)
    return {
        "predictions": [float(abs(each).sum()) for each in predictions],
        "shapes": [list(each.shape) for each in (*predictions, *(each for each in labels if each is not None))],
        "metrics": quiet(found.metrics),
    }


def quiet(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics without times."""
    return comparable([metrics], leave_out=("preparation",))[0]


def resumes(trainer: Any, plan: Plan | None = None, resume: Any = True, **changes: Any) -> dict[str, Any]:
    """Train, then train again from a checkpoint in a new trainer."""
    trainer.train()
    folder, kind = trainer.args.output_dir, "ours" if isinstance(trainer, ftkit.TrainerMixin) else "stock"
    assert plan is not None
    again = built(plan, kind, folder, **changes)
    again.train(resume_from_checkpoint=f"{folder}/{resume}" if isinstance(resume, str) else resume)
    return {"again": evidence_of(again, plan, folder)}


def resuming(
    feature: str,
    *,
    resume: Any = True,
    changes: Mapping[str, Any] | None = None,
    differs: str = "",
    raises: bool = False,
    **plan: Any,
) -> Case:
    """Return a case that resumes."""
    made = Plan(**plan)
    acting = Plan(**plan, act=partial(resumes, plan=made, resume=resume, **(changes or {})))
    return Case("Resuming", feature, partial(trained, acting), differs, raises)


def saves(trainer: Any) -> dict[str, Any]:
    """Train, save the model and read it again."""
    trainer.train()
    folder = f"{trainer.args.output_dir}/model"
    trainer.save_model(folder)
    tensors = load_file(f"{folder}/model.safetensors")
    return {"names": sorted(tensors), "tensors": tensors}


def steps_by_hand(trainer: Any) -> dict[str, Any]:
    """Call training_step and prediction_step on batches of the trainer's own loader."""
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.create_optimizer_and_scheduler(2)
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.training_step(trainer.model, dict(batch))
    predicted = trainer.prediction_step(trainer.model, dict(batch), prediction_loss_only=True)[0]
    return {"losses": [float(loss), float(predicted)]}


def asks(trainer: Any) -> dict[str, Any]:
    """Ask the trainer what its documented methods answer."""
    trainer.train()
    groups = [len(group["params"]) for group in trainer.optimizer.param_groups]
    return {
        "decay": sorted(trainer.get_decay_parameter_names(trainer.model)),
        "trainable": trainer.get_num_trainable_parameters(),
        "rates": trainer.get_learning_rates(),
        "groups": groups,
        "group": trainer.get_optimizer_group(next(iter(trainer.model.parameters())))["weight_decay"],
        "loaders": [len(trainer.get_train_dataloader()), trainer.num_examples(trainer.get_train_dataloader())],
        "flops": trainer.floating_point_ops(token_rows(1)[0]) > 0,
        "zero": [trainer.is_world_process_zero(), trainer.is_local_process_zero()],
    }


def card(trainer: Any) -> dict[str, Any]:
    """Write a model card."""
    trainer.train()
    trainer.create_model_card(model_name="a-model", tags="test")
    return {"files": names_in(trainer.args.output_dir, "README.md")}


# --- callbacks


class StopAt(transformers.TrainerCallback):
    """Stops, saves and evaluates through the control object."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_evaluate = control.should_save = control.should_log = state.global_step == 2
        control.should_training_stop = state.global_step == 3
        return control


class Norms(transformers.TrainerCallback):
    """Adds up the norms of weights and gradients, as callbacks that watch training do."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        squares = [float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None]
        self.seen.append(sum(squares) ** 0.5)


class Writer(transformers.TrainerCallback):
    """Writes a file into each checkpoint when it is saved."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with open(f"{args.output_dir}/checkpoint-{state.global_step}/mine.txt", "w") as file:
            file.write("mine")


def watched(trainer: Any) -> dict[str, Any]:
    """Train and return what a watching callback saw."""
    trainer.train()
    return {"seen": [c.seen for c in trainer.callback_handler.callbacks if isinstance(c, Norms)]}


def written(trainer: Any) -> dict[str, Any]:
    """Train and return what a callback's files are."""
    trainer.train()
    return {"files": [str(len(names_in(trainer.args.output_dir, "checkpoint-*/mine.txt")))]}


# --- subclasses and functions of a user's


class OwnStep:
    """Overrides training_step, log and the loader."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)  # type: ignore[misc]  # the Trainer has it

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log({**logs, "mine": 1.0}, *args, **kwargs)  # type: ignore[misc]  # as above

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(torch.utils.data.DataLoader(self.train_dataset, batch_size=3))


class OwnOptimizer:
    """Overrides create_optimizer with two learning rates."""

    def create_optimizer(self, *args: Any) -> Any:
        head = [p for n, p in self.model.named_parameters() if "lm_head" in n]
        rest = [p for n, p in self.model.named_parameters() if "lm_head" not in n]
        # With a larger eps, Adam makes no whole step of a gradient that is rounding, which other CPUs do otherwise.
        self.optimizer = torch.optim.AdamW([{"params": rest}, {"params": head, "lr": 3e-2}], lr=1e-2, eps=1e-6)
        return super().create_optimizer(*args)  # type: ignore[misc]  # as above


def accuracy(prediction: Any) -> dict[str, float]:
    """Return a metric of logits, labels and what `include_for_metrics` adds."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    extra = {
        name: float(abs(getattr(prediction, name)).sum())
        for name in ("inputs", "losses")
        if getattr(prediction, name) is not None
    }
    return {"mean": float(logits.mean()), "rows": float(len(logits)), **extra}


class Batched:
    """A metric that is computed batch by batch."""

    def __init__(self) -> None:
        self.total, self.rows = 0.0, 0

    def __call__(self, prediction: Any, compute_result: bool = False) -> dict[str, float]:
        self.total += float(prediction.predictions.sum())
        self.rows += len(prediction.predictions)
        return {"mean": self.total / self.rows} if compute_result else {}


def falling(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def own_optimizers(cls: Any, **fields: Any) -> Callable[[nn.Module], Any]:
    """Return a maker of (optimizer, scheduler)."""

    def make(model: nn.Module) -> Any:
        optimizer = cls(model.parameters(), lr=1e-2, **fields)
        return optimizer, falling(optimizer)

    return make


def adapted() -> nn.Module:
    """Return the Llama with LoRA."""
    torch.manual_seed(8)
    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def plus_one(logits: Tensor, labels: Tensor) -> Tensor:
    return logits + 1


def hub_rows() -> datasets.Dataset:
    """Return rows as a `datasets.Dataset`, with a column that no model reads."""
    rows = [{key: value.tolist() for key, value in row.items()} for row in token_rows(ROWS)]
    return datasets.Dataset.from_list([{**row, "note": "x"} for row in rows])


def labelled() -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(3)
    return [
        {"input_ids": row["input_ids"], "labels": int(torch.randint(3, (), generator=random))} for row in token_rows(ROWS)
    ]


def held(count: int = 10) -> list[dict[str, Tensor]]:
    return token_rows(count, seed=9)
