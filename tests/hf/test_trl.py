"""TRL's trainers on the engine train as TRL does under DDP, or on two ranks as on one.

Most references are TRL itself on two ranks. Its default loss, which computes the
head and the loss together in chunks and reads the head's weight without calling the head, stays in use. Preference
training makes two forwards for one backward: with an explicit reference model, with the adapter switched off, or, when
the reference values are computed before, with the model that has not been prepared yet.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
import trl
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers

import ftkit
from tests.hf import runs
from tests.hf.runs import Run, assert_same_history, assert_same_weights, train


class OurSFTTrainer(ftkit.TrainerMixin, trl.SFTTrainer):
    """As a user writes it."""


class OurSFTConfig(ftkit.ArgumentsMixin, trl.SFTConfig):
    """As a user writes it."""


class OurDPOTrainer(ftkit.TrainerMixin, trl.DPOTrainer):
    """As a user writes it."""


class OurDPOConfig(ftkit.ArgumentsMixin, trl.DPOConfig):
    """As a user writes it."""


# --- words


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the words w0 .. w96."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(runs.VOCABULARY)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


def sentence(random: torch.Generator, low: int, high: int) -> str:
    """Return random words, `low` to `high` of them."""
    count = int(torch.randint(low, high + 1, (), generator=random))
    return " ".join(f"w{int(number)}" for number in torch.randint(4, runs.VOCABULARY, (count,), generator=random))


def answers() -> datasets.Dataset:
    """Return prompts with completions: the loss is on the completions only."""
    random = torch.Generator().manual_seed(3)
    rows = [{"prompt": sentence(random, 2, 5), "completion": " " + sentence(random, 3, 8)} for _ in range(24)]
    return datasets.Dataset.from_list(rows)


def preferences() -> datasets.Dataset:
    """Return prompts with a better and a worse completion."""
    random = torch.Generator().manual_seed(4)
    kinds = {"prompt": (2, 5), "chosen": (3, 8), "rejected": (3, 8)}
    rows = [{key: " " + sentence(random, *lengths) for key, lengths in kinds.items()} for _ in range(12)]
    return datasets.Dataset.from_list(rows)


# --- what is trained


def adapted() -> PeftModel:
    """Return the small Llama with LoRA on every linear layer, its adapter not zero."""
    torch.manual_seed(12)
    model = get_peft_model(runs.llama(), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model


def other_llama() -> torch.nn.Module:
    """Return a Llama with other weights."""
    model = runs.llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return model


def count_heads(trainer: Any) -> list[int]:
    """Note the calls of the head."""
    model = trainer.model.get_base_model() if isinstance(trainer.model, PeftModel) else trainer.model
    model.calls_of_the_head = []
    model.lm_head.register_forward_pre_hook(lambda *_: model.calls_of_the_head.append(1))
    return model.calls_of_the_head


def heads_called(trainer: Any) -> int:
    """Return how often the head was called since."""
    model = trainer.model.get_base_model() if isinstance(trainer.model, PeftModel) else trainer.model
    return len(model.calls_of_the_head)


LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.0)
COMMON = {
    "bf16": False,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "max_length": 32,
    "learning_rate": 1e-2,
}
SFT = Run(
    rows=answers,
    eval_rows=answers,
    stock_classes=(trl.SFTTrainer, trl.SFTConfig),
    our_classes=(OurSFTTrainer, OurSFTConfig),
    arguments={**COMMON, "eval_strategy": "steps", "eval_steps": 3},
    options={"processing_class": tokenizer},
    before=count_heads,
    after=heads_called,
)
DPO = Run(
    rows=preferences,
    stock_classes=(trl.DPOTrainer, trl.DPOConfig),
    our_classes=(OurDPOTrainer, OurDPOConfig),
    arguments={**COMMON, "beta": 0.5, "num_train_epochs": 3},
    options={"processing_class": tokenizer, "ref_model": other_llama},
    before=count_heads,
    after=heads_called,
)


def with_adapter(run: Run, config: LoraConfig = LORA) -> Run:
    """Return a run in which TRL puts LoRA on the model."""
    options = {key: value for key, value in run.options.items() if key != "ref_model"}
    return replace(run, options={**options, "peft_config": config})


PACKED = {"packing": True, "packing_strategy": "wrapped", "max_length": 16, "dataloader_drop_last": True}
RUNS = {
    "sft": SFT,
    "sft lora": with_adapter(SFT),
    "sft tied": replace(SFT, model=runs.tied_llama),
    "sft given adapter": replace(SFT, model=adapted),
    "sft packing": replace(SFT, eval_rows=0, arguments={**COMMON, **PACKED}),
    "dpo reference": DPO,
    "dpo lora": with_adapter(DPO),
    "dpo given adapter": replace(DPO, model=adapted, options={"processing_class": tokenizer}),
}


@pytest.fixture(scope="module")
def outcomes(world2, tmp_path_factory):
    """`outcomes(kind, name)` is what both ranks saw of a run; each run is made once."""
    made: dict[tuple[str, str], list[runs.Outcome]] = {}

    def of(kind: str, name: str) -> list[runs.Outcome]:
        if (kind, name) not in made:
            folder = str(tmp_path_factory.mktemp(kind))
            made[kind, name] = world2.run(train, kind, folder, replace(RUNS[name], ftkit={"stage": 3}))
        return made[kind, name]

    return of


OF_RANKS = {name: ["eval_loss"] if name.startswith("sft") else [] for name in RUNS}
"""What TRL under DDP computes otherwise than on one rank: samples repeated to fill the last batch count there."""


@pytest.mark.slow
def test_evaluation_of_sft_is_that_of_one_rank(outcomes, world1, tmp_path):
    alone = world1.run(train, "stock", str(tmp_path), RUNS["sft"])[0]
    assert outcomes("ours", "sft")[0].column("eval_loss") == pytest.approx(alone.column("eval_loss"), rel=1e-5)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "given" in name or "tied" in name else name for name in RUNS]
)
def test_as_trl_under_ddp(name, outcomes):
    theirs, ours = outcomes("stock", name), outcomes("ours", name)
    for one, two in zip(ours, theirs):
        assert len(one.column("loss")) >= 3
        assert_same_history(one, two, leave_out=OF_RANKS[name])
        assert one.after == two.after == 0  # the fused head was used, in training and in evaluation
    assert_same_weights(ours[0].weights, theirs[0].weights)


@pytest.mark.quick(1)
@pytest.mark.parametrize("settings", [{"stage": 1}, {"stage": 3, "activations": "keep", "reshard_after_forward": False}])
@pytest.mark.parametrize("name", ["sft", "dpo lora"])
def test_at_other_stages(name, settings, outcomes, world2, tmp_path):
    ours = world2.run(train, "ours", str(tmp_path), replace(RUNS[name], ftkit=settings))[0]
    assert_same_history(ours, outcomes("stock", name)[0], leave_out=OF_RANKS[name])


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["sft", "sft lora"])
def test_sft_saves_and_resumes_on_other_ranks(name, worlds, tmp_path):
    run = RUNS[name]
    run = replace(run, arguments={**run.arguments, "save_strategy": "steps", "save_steps": 1}, ftkit={"stage": 3})
    whole = worlds[2].run(train, "ours", str(tmp_path / "whole"), run)[0]
    for ranks, step in ((3, 2), (1, 3)):
        resumed = replace(run, resume=str(tmp_path / "whole" / f"checkpoint-{step}"), ftkit="auto")
        again = worlds[ranks].run(train, "ours", str(tmp_path / str(ranks)), resumed)[0]
        # TRL counts tokens from the resume on, and its evaluation is a mean over the ranks' means
        left_out = ["train_loss", "num_tokens", "entropy", "mean_token_accuracy", "eval_loss"]
        assert_same_history(again, whole, leave_out=left_out)
    if name == "sft":
        return
    opened = PeftModel.from_pretrained(runs.llama(), tmp_path / "whole" / "checkpoint-4").state_dict()
    assert_same_weights(opened, whole.weights, limit=0)


def evaluated(kind: str, folder: str, run: Run) -> tuple[dict[str, float], int]:
    """Evaluate preferences; return the metrics, and how often the head was called."""
    trainer = runs.make_trainer(kind, folder, run)
    count_heads(trainer)
    found = {key: value for key, value in trainer.evaluate().items() if not any(word in key for word in runs.TIMINGS)}
    return found, heads_called(trainer)


def test_an_evaluation_of_preferences_is_trls(world2, tmp_path):
    run = replace(DPO, eval_rows=preferences, ftkit={"stage": 3})
    ours, theirs = (world2.run(evaluated, kind, str(tmp_path / kind), run)[0] for kind in ("ours", "stock"))
    assert ours[1] == theirs[1]
    assert ours[0] == pytest.approx(theirs[0], rel=1e-4)


def from_disk() -> datasets.Dataset:
    """Return the preferences as a file on disk: TRL keeps the reference values beside it."""
    return datasets.load_from_disk(str(Path("preferences")))


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["dpo reference", "dpo lora"])
def test_reference_values_computed_before_training(name, outcomes, world2, tmp_path):
    made = []
    for kind in ("stock", "ours"):
        preferences().save_to_disk(str(tmp_path / kind / "preferences"))
        arguments = {**RUNS[name].arguments, "precompute_ref_log_probs": True}
        run = replace(RUNS[name], rows=from_disk, arguments=arguments, ftkit={"stage": 3})
        made.append(world2.run(train_in, str(tmp_path / kind), kind, run)[0])
    theirs, ours = made
    assert_same_history(ours, theirs)
    assert ours.column("loss") == pytest.approx(outcomes("ours", name)[0].column("loss"), rel=1e-4)


def train_in(folder: str, kind: str, run: Run) -> runs.Outcome:
    """A case for a world: `train` with `folder` as the working folder."""
    import os

    before = Path.cwd()
    os.chdir(folder)
    try:
        return train(kind, folder, run)
    finally:
        os.chdir(before)


def test_arguments_of_the_config_classes_parse():
    words = ["--output_dir", "x", "--use_cpu", "--bf16", "False", "--ftkit", '{"stage": 3}']
    words += ["--model_init_kwargs", '{"dtype": "float32"}']
    (parsed,) = transformers.HfArgumentParser(OurSFTConfig).parse_args_into_dataclasses(words)
    assert parsed.ftkit == {"stage": 3}
    assert parsed.model_init_kwargs == {"dtype": "float32"}
    assert isinstance(parsed, trl.SFTConfig)


def test_plain_training_arguments_are_refused_rather_than_dropped(tmp_path):
    """SFTTrainer rebuilds TrainingArguments as its own: the engine must not get lost on the way."""
    runs.fresh_state()
    arguments = ftkit.TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(TypeError, match="ftkit"):
        OurSFTTrainer(runs.llama(), arguments, train_dataset=answers(), processing_class=tokenizer())
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ftkit.UserError, match="SFTConfig has no field 'ftkit'"):
        OurSFTTrainer(runs.llama(), arguments, train_dataset=answers(), processing_class=tokenizer())


# --- ten steps: two ranks as one, or as TRL on two ranks


class OurKTOTrainer(ftkit.TrainerMixin, trl.KTOTrainer):
    """As a user writes it."""


class OurKTOConfig(ftkit.ArgumentsMixin, trl.KTOConfig):
    """As a user writes it."""


class OurRewardTrainer(ftkit.TrainerMixin, trl.RewardTrainer):
    """As a user writes it."""


class OurRewardConfig(ftkit.ArgumentsMixin, trl.RewardConfig):
    """As a user writes it."""


class Drawn:
    """Draws completions by step and rank. TRL's own seeds differ from ours, which depend on the micro-batch."""

    def _generate(self, prompts: list[Any]) -> Any:
        torch.manual_seed(100 * self.state.global_step + self.accelerator.process_index)
        return super()._generate(prompts)


class StockGRPOTrainer(Drawn, trl.GRPOTrainer):
    """TRL's own, with the draws of `Drawn`."""


class OurGRPOTrainer(Drawn, ftkit.TrainerMixin, trl.GRPOTrainer):
    """As a user writes it, with the draws of `Drawn`."""


class OurGRPOConfig(ftkit.ArgumentsMixin, trl.GRPOConfig):
    """As a user writes it."""


def judged() -> datasets.Dataset:
    """Return prompts with completions that are wanted or not."""
    random = torch.Generator().manual_seed(5)
    rows = [
        {"prompt": sentence(random, 2, 5), "completion": " " + sentence(random, 3, 8), "label": number % 2 == 0}
        for number in range(24)
    ]
    return datasets.Dataset.from_list(rows)


def asked() -> datasets.Dataset:
    """Return prompts alone."""
    random = torch.Generator().manual_seed(6)
    return datasets.Dataset.from_list([{"prompt": sentence(random, 2, 5)} for _ in range(24)])


def scorer() -> torch.nn.Module:
    """Return the small Llama with one score in the head's place."""
    torch.manual_seed(18)
    config = transformers.LlamaConfig(**{**runs.llama().config.to_dict(), "num_labels": 1})
    return transformers.LlamaForSequenceClassification(config)


def longest(completions: list[str], **kwargs: Any) -> list[float]:
    """Reward completions with many different words."""
    return [float(len(set(text.split()))) for text in completions]


TEN = {"bf16": False, "max_steps": 10, "learning_rate": 1e-2, "dataloader_drop_last": True}
TRAINERS = {
    "sft": replace(SFT, eval_rows=0, arguments={**TEN, "max_length": 32}, before=None, after=None),
    "dpo": replace(DPO, arguments={**TEN, "max_length": 32, "beta": 0.5}, before=None, after=None),
    "reward": Run(
        model=scorer,
        rows=preferences,
        stock_classes=(trl.RewardTrainer, trl.RewardConfig),
        our_classes=(OurRewardTrainer, OurRewardConfig),
        arguments={**TEN, "max_length": 32},
        options={"processing_class": tokenizer},
    ),
}
MEANS_OF_RANKS = ["train_loss", "entropy", "accuracy", "num_tokens", "rewards", "logps", "logits", "margin"]
"""Metrics that TRL averages over ranks without weights."""


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_ten_steps_of_two_ranks_are_those_of_one(name, worlds, tmp_path):
    run = replace(TRAINERS[name], ftkit={"stage": 3})
    one, two = (worlds[ranks].run(train, "ours", str(tmp_path / str(ranks)), run)[0] for ranks in (1, 2))
    assert len(one.column("loss")) == 10
    assert_same_history(two, one, leave_out=MEANS_OF_RANKS)
    assert_same_weights(two.weights, one.weights, limit=1e-3)


GRPO = Run(
    rows=asked,
    stock_classes=(StockGRPOTrainer, trl.GRPOConfig),
    our_classes=(OurGRPOTrainer, OurGRPOConfig),
    arguments={**TEN, "num_generations": 3, "max_completion_length": 6, "per_device_train_batch_size": 3},
    options={"processing_class": tokenizer, "reward_funcs": longest},
)


KTO = Run(
    rows=judged,
    stock_classes=(trl.KTOTrainer, trl.KTOConfig),
    our_classes=(OurKTOTrainer, OurKTOConfig),
    arguments={**TEN, "max_length": 32},
    options={"processing_class": tokenizer, "ref_model": other_llama},
)


@pytest.mark.slow
@pytest.mark.parametrize("run", [pytest.param(KTO, id="kto"), pytest.param(GRPO, id="grpo")])
def test_ten_steps_of_two_ranks_are_trls(run, world2, tmp_path):
    """TRL itself differs between one and two ranks here.

    KTO pairs prompts with other completions within a batch of one device; each rank of GRPO samples its own completions.
    """
    stock, ours = (
        world2.run(train, kind, str(tmp_path / kind), replace(run, ftkit={"stage": 3}))[0] for kind in ("stock", "ours")
    )
    assert len(ours.column("loss")) == 10
    assert_same_history(ours, stock, leave_out=["step_time"])
    assert_same_weights(ours.weights, stock.weights, limit=1e-3)
