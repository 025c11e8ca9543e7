"""Whatever stands in a model's config.json: an error that names the file and, where that can be known, the key."""

import json
import os
import re

import pytest
from hypothesis import strategies as st
from transformers import AutoConfig

from ftkit.config.recipe import Model
from ftkit.errors import UserError
from ftkit.hf.weights.loading import load_model
from ftkit.train.answers import load
from ftkit.train.run_rows import load_tokenizer
from tests import hostile
from tests.hostile import LEAVES, examples, fuzz
from tests.tiny import make_base


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def folder(base, tmp_path):
    """Return a folder with the base's files, whose config.json may be written."""
    for path in base.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    return tmp_path


def told(folder, content):
    """Write config.json and load the folder, which must be refused; returns what was said."""
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError) as refusal:
        load_model(folder)
    text = str(refusal.value)
    assert len(text) < 900
    return text


def fields_of(base, **changes):
    return {**json.loads((base / "config.json").read_text()), **changes}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0),
        ("num_attention_heads", -4),
        ("num_attention_heads", "4"),
        ("num_attention_heads", 10**30),
        ("num_key_value_heads", 0),
        ("head_dim", 0),
        ("head_dim", 7),
        ("hidden_size", 2**62),
        ("hidden_size", [32]),
        ("vocab_size", -1),
        ("vocab_size", 0),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 50_000),
        ("num_hidden_layers", 10**12),
        ("num_labels", 10**12),
        ("num_labels", "many"),
        ("hidden_act", "nope"),
        ("rope_parameters", {"rope_type": "nope"}),
        ("rope_parameters", {"rope_type": "yarn"}),
        ("dtype", "nope"),
        ("id2label", 5),
        ("architectures", 5),
        ("quantization_config", 5),
        ("text_config", 5),
        ("model_type", ["llama"]),
        ("model_type", "nope"),
        ("model_type", "zamba2"),
        ("layer_types", ["nope"]),
        ("attn_implementation", "nope"),
        ("rms_norm_eps", None),
    ],
)
def test_a_value_that_no_model_can_be_made_of_is_named(folder, base, key, value):
    text = told(folder, fields_of(base, **{key: value}))
    assert str(folder) in text
    if (key, value) not in KNOWN_BY_FILE_ONLY:
        assert key in text or key == "model_type", text


KNOWN_BY_FILE_ONLY = [("quantization_config", 5), ("num_labels", "many"), ("text_config", 5)]
"""transformers' own error says neither key nor value, and its class has no default to set beside it."""


@pytest.mark.parametrize("content", ["", "{", "[]", "5", "null", '"llama"', "{}", "[" * 100_000, "\0", '{"a": NaN}'])
def test_a_file_that_is_no_configuration(folder, content):
    assert str(folder) in told(folder, content)


def test_a_fifo_in_a_folder_is_not_waited_for(folder):
    os.mkfifo(folder / "config.json")
    with pytest.raises(UserError, match=r"config\.json: is neither a file nor a folder"):
        load_model(folder)
    with pytest.raises(UserError, match=r"config\.json: is neither a file nor a folder"):
        load_tokenizer(Model(name=str(folder)))


def test_a_buffer_of_many_gib(tmp_path):
    fields = {"model_type": "bert", "max_position_embeddings": 10**12, "num_hidden_layers": 1, "hidden_size": 8}
    with pytest.raises(UserError, match="would be a buffer of"):
        load_model(None, task="masked-lm", config={**fields, "num_attention_heads": 1, "intermediate_size": 8})


@pytest.mark.parametrize("key", ["num_attention_heads", "vocab_size"])
def test_an_inline_configuration_is_named_by_its_key(key):
    with pytest.raises(UserError, match=rf"model\.config: .*{key} is -8"):
        load_model(None, task="causal-lm", config={"model_type": "llama", "num_hidden_layers": 1, key: -8})


def test_a_configuration_that_was_read_before_is_named_by_its_file(folder, base):
    (folder / "config.json").write_text(json.dumps(fields_of(base, vocab_size=-1)))
    config = AutoConfig.from_pretrained(folder)
    with pytest.raises(UserError, match=re.escape(f"{folder}/config.json")):
        load_model(None, config=config)


def test_other_readers_of_a_folder_say_the_same(folder, base):
    (folder / "config.json").write_text(json.dumps(fields_of(base, num_attention_heads=0)))
    with pytest.raises(UserError, match=r"config\.json: cannot be loaded .*num_attention_heads is 0"):
        load(str(folder))
    with pytest.raises(UserError, match=r"config\.json: no model configuration.*num_attention_heads is 0"):
        load_tokenizer(Model(name=str(folder)))


def test_an_error_of_our_own_is_not_taken_for_the_users(monkeypatch, base):
    monkeypatch.setattr("ftkit.hf.weights.loading.find_weights", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load_model(base)


@examples(12, 2000)
def test_any_value_of_any_key(count, folder, base):
    whole = fields_of(base)
    whole |= {"num_labels": 2, "id2label": {"0": "a"}, "layer_types": None, "head_dim": 8, "text_config": {}, "auto_map": {}}

    def check(change):
        try:
            (folder / "config.json").write_text(json.dumps({**whole, **change}))
        except UnicodeEncodeError:
            return
        hostile.told(folder, lambda: load_model(folder))

    fuzz(count, st.dictionaries(st.sampled_from(sorted(whole)), LEAVES | st.lists(LEAVES, max_size=2), max_size=2), check)
