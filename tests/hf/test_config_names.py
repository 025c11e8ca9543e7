"""Names that are given to transformers match something: fields of an inline configuration, special tokens."""

import json

import pytest

from ftkit.config.recipe import Model
from ftkit.errors import UserError
from ftkit.hf.weights.loading import load_model
from ftkit.train.run_rows import load_tokenizer
from tests.tiny import make_tokenizer

LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
LLAMA |= {"num_attention_heads": 4}


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"num_key_value_head": 2}, "model.config.num_key_value_head: .*did you mean 'num_key_value_heads'"),
        (
            {"model_type": "gemma3", "text_config": {"hidden_sizes": 8}},
            "model.config.text_config.hidden_sizes: .*did you mean 'hidden_size'",
        ),
    ],
)
def test_a_field_of_a_configuration_that_matches_nothing_stops(fields, meant):
    facts = {**LLAMA, **fields} if "model_type" not in fields else fields
    with pytest.raises(UserError, match=meant):
        load_model(None, config=facts)


def test_fields_that_transformers_reads_are_fine():
    read = {"rope_theta": 5e5, "tie_word_embeddings": True, "attention_bias": True}
    assert load_model(None, config={**LLAMA, **read}).config.hidden_size == 32


def test_a_special_token_that_no_vocabulary_has_stops(tmp_path):
    make_tokenizer(tmp_path)
    assert load_tokenizer(Model(name=str(tmp_path))).eos_token == "<end>"
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": "<edn>"}))
    with pytest.raises(UserError, match="the tokenizer's eos_token '<edn>' is in no vocabulary; did you mean '<end>'"):
        load_tokenizer(Model(name=str(tmp_path)))


def test_a_field_that_a_configuration_derives_from_others_is_one():
    made = load_model(None, config=LLAMA, task="sequence-classification", num_labels=5)
    assert made.score.out_features == 5
    assert load_model(None, config={**LLAMA, "num_labels": 4}, task="sequence-classification").score.out_features == 4
    with pytest.raises(UserError, match="did you mean 'num_labels'"):
        load_model(None, config=LLAMA, num_label=5)


GEMMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
GEMMA3 = {"model_type": "gemma3", "text_config": {**GEMMA, "num_key_value_heads": 2, "head_dim": 8}}
GEMMA3["vision_config"] = {key: value for key, value in GEMMA.items() if key != "vocab_size"} | {"image_size": 28}


def test_a_part_of_a_configuration_is_merged_with_what_is_there():
    task = {"task": "image-text-to-text"}
    made = load_model(None, config=GEMMA3, text_config={"attention_dropout": 0.1}, **task).config.text_config
    assert (made.attention_dropout, made.hidden_size, made.head_dim) == (0.1, 32, 8)
    with pytest.raises(UserError, match=r"load_model\.text_config\.attention_dropot: .*'attention_dropout'"):
        load_model(None, config=GEMMA3, text_config={"attention_dropot": 0.1}, **task)
