"""A key of a recipe that matches nothing is pointed to the right one, whatever tool its name is from."""

from dataclasses import replace

import pytest

from ftkit.config.engine import EngineSettings
from ftkit.config.errors import keys_of, section_of
from ftkit.config.foreign_keys import PEERS
from ftkit.config.recipe import Recipe, RecipeError, parse
from ftkit.spec.strategy import Strategy
from ftkit.spec.update_rules import RULES
from ftkit.train.arguments import engine_settings, strategy_of

FACTS = """\
model: {name: some/model}
data: {name: some/set}
output: {dir: runs/x}
"""


def message_of(*overrides):
    with pytest.raises(RecipeError) as stop:
        parse(FACTS, "r.yaml", list(overrides))
    return str(stop.value)


def test_every_name_of_another_tool_leads_to_a_key_that_is_there():
    for key in PEERS.values():
        section, _, inner = key.partition(".")
        kind = section_of(Recipe.model_fields[section])
        assert not inner or inner in keys_of(kind), key
    for word, key in PEERS.items():
        assert word != key.rpartition(".")[2], word


@pytest.mark.parametrize(
    ("assignment", "meant"),
    [
        ("learning_rate=1e-5", "here it is 'optimizer.lr'"),
        ("train.per_device_train_batch_size=2", "here it is 'train.batch_tokens' (tokens of one optimizer step"),
        ("train.weight_decy=1", "did you mean 'optimizer.weight_decay'?"),
        ("optimizer.epochs=2", "did you mean 'train.epochs'?"),
        ("data.dataset=org/rows", "here it is 'data.path' (file or folder: JSONL"),
        ("deepspeed=zero.json", "ftkit starts its ranks itself"),
        ("optimizer.foo=1", "known here: name, lr,"),
    ],
)
def test_a_misplaced_key_is_pointed_to_its_section(assignment, meant):
    assert meant in message_of(assignment)


@pytest.mark.parametrize(
    ("tokens", "batch"), [(1024, 65536), (1000, 64000), (176, 176 * 256), (3, 3 * 16384), (40000, 40000), (100000, 100000)]
)
def test_the_default_batch_has_whole_sequences(tokens, batch):
    recipe = parse(FACTS, "r.yaml", [f"data.sequence_tokens={tokens}"])
    assert recipe.train.batch_tokens == batch
    assert parse(recipe.dump(), "r.yaml").train.batch_tokens == batch
    with pytest.raises(RecipeError, match="a step needs whole sequences"):
        parse(FACTS, "r.yaml", ["data.sequence_tokens=1000", "train.batch_tokens=65536"])


@pytest.mark.parametrize(("key", "value"), [("split", "test"), ("format", "messages")])
def test_split_and_format_belong_to_each_source(key, value):
    several = FACTS.replace("{name: some/set}", "{sources: [{name: some/set}, {name: other/set}]}")
    with pytest.raises(RecipeError, match="found `split` or `format` beside `sources`, each of which has its own"):
        parse(several, "r.yaml", [f"data.{key}={value}"])
    recipe = parse(several, "r.yaml", [f"data.sources.0.{key}={value}"])
    assert parse(recipe.dump(), "r.yaml") == recipe


def test_an_encoder_and_decoder_learns_its_answers_alone():
    problem = "data.loss_on: is all and task: seq2seq trains on answers only"
    assert problem in message_of("task=seq2seq", "data.loss_on=all")


def optimizer(text: str):
    return parse(FACTS + f"optimizer: {text}\n", "r.yaml").optimizer


@pytest.mark.parametrize(
    ("text", "rule", "betas", "eps"),
    [
        ("{}", "adamw", (0.9, 0.95), 1e-8),
        ("{name: paged_adamw_32bit, betas: [0.8, 0.9]}", "adamw", (0.8, 0.9), 1e-8),
        ("{name: lion_32bit}", "lion", (0.9, 0.99), None),
        ("{name: paged_adamw_8bit}", "adamw_8bit", (0.9, 0.95), 1e-8),
        ("{name: adamw_torch_8bit, eps: 1e-6}", "adamw_8bit", (0.9, 0.95), 1e-6),
        ("{name: paged_lion_8bit}", "lion_8bit", (0.9, 0.99), None),
        ("{name: sgd, args: {momentum: 0.9, nesterov: true}}", "sgd", None, None),
        ("{name: adagrad}", "adagrad", None, 1e-10),
    ],
)
def test_an_optimizer_by_name_has_the_settings_of_its_rule(text, rule, betas, eps):
    found = optimizer(text)
    assert (found.name, found.betas, found.eps) == (rule, betas, eps)
    assert found.rule.name == rule
    assert found.rule.moments == RULES[rule].of(found.args).moments


def test_a_dumped_optimizer_reads_back():
    text = FACTS + "optimizer: {name: rmsprop, args: {centered: true}, eps: 1e-6}\n"
    read = parse(text, "r.yaml")
    assert parse(read.dump(), "dumped.yaml").optimizer == read.optimizer


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{name: adafactor}", "optimizer.name: found adafactor: it needs the means of rows and columns.*use adamw"),
        ("{name: ademamix_8bit}", "optimizer.name: found ademamix_8bit: its 8-bit state is not supported; use adamw_8bit"),
        ("{master: bf16}", "optimizer.master: found 'bf16', needs 'fp32' or 'split'"),
        ("{name: adam}", r"optimizer.name: found 'adam', needs .* \(did you mean 'adamw'\?\)"),
        ("{name: sgd, betas: [0.9, 0.99]}", "optimizer: betas is not a setting of sgd; remove it"),
        ("{name: lion, eps: 1e-8}", "optimizer: eps is not a setting of lion; remove it"),
        ("{args: {momentum: 0.9}}", "optimizer: args.momentum is not a setting of adamw, which has no further settings"),
        ("{name: ademamix, args: {t_alpha: 1e4}}", "args.t_alpha: found 10000.0, needs a number of steps, 0 or more"),
        ("{name: sgd, args: {nesterov: true}}", "optimizer: args.nesterov needs args.momentum"),
        ("{name: rmsprop, args: {alpha: 1.5}}", "optimizer: args.alpha: found 1.5, needs a number from 0, below 1"),
        ("{name: sgd, args: {nesterov: 1}}", "optimizer: args.nesterov: found 1, needs true or false"),
        ("{name: sgd, args: {momentum: true}}", "optimizer: args.momentum: found True, needs a number from 0, below 1"),
        ("{name: ademamix, args: {t_alpha: -1}}", "optimizer: args.t_alpha: found -1, needs a number of steps, 0 or more"),
        ("{name: sgd, momentum: 0.9}", r"unknown key; here it is 'optimizer.args' \(further settings of the rule"),
    ],
)
def test_what_an_optimizer_cannot_use_is_refused(text, words):
    with pytest.raises(RecipeError, match=words):
        optimizer(text)


def test_forms_of_the_state_belong_to_the_optimizer_and_become_choices_of_the_strategy():
    recipe = parse(FACTS + "optimizer: {name: adamw_bnb_8bit, master: split, convert_state: true}\n", "r.yaml")
    strategy = engine_settings(recipe).strategy
    assert (strategy.master, strategy.convert_state) == ("split", True)
    assert strategy_of(recipe, "fp16") == Strategy(dtype="fp16", master="split", convert_state=True)
    assert recipe.engine == Strategy()
    assert recipe.optimizer.described.startswith("adamw_8bit, split master, peak learning rate")
    assert optimizer("{}").described.startswith("adamw, peak learning rate")
    assert parse(recipe.dump(), "dumped.yaml") == recipe
    assert EngineSettings.of({"master": "split", "convert_state": True}).strategy == replace(
        Strategy(), master="split", convert_state=True
    )
    for key, value in (("master", "split"), ("convert_state", True)):
        found = message_of(f"engine.{key}={str(value).lower()}")
        assert f"engine.{key}: is {value}; in a recipe, set optimizer.{key}" in found
