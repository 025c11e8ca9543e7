"""A broken config.json gives an error that names the file and has the library's reason; changes are merged as in stock."""

import json

import pytest
from transformers import AutoConfig

from ftkit.errors import UserError
from ftkit.hf.load.model import load_model
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
    ("key", "value", "reason"),
    [
        ("num_attention_heads", 0, "ZeroDivisionError"),
        ("num_attention_heads", "4", "num_attention_heads"),
        ("hidden_size", 2**62, "overflowed"),
        ("vocab_size", -1, "-1"),
        ("rope_parameters", {"rope_type": "nope"}, "nope"),
        ("model_type", "nope", "nope"),
    ],
)
def test_the_error_names_the_file_and_has_the_reason(folder, base, key, value, reason):
    text = told(folder, fields_of(base, **{key: value}))
    assert str(folder / "config.json") in text
    assert reason in text


@pytest.mark.parametrize("content", ["", "[]", "{}", "[" * 100_000])
def test_a_file_that_is_no_configuration(folder, content):
    assert str(folder) in told(folder, content)


def test_an_error_of_our_own_is_not_taken_for_the_users(monkeypatch, base):
    monkeypatch.setattr("ftkit.hf.load.model.find_weights", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load_model(base)


GEMMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
GEMMA3 = {"model_type": "gemma3", "text_config": {**GEMMA, "num_key_value_heads": 2, "head_dim": 8}}
GEMMA3["vision_config"] = {key: value for key, value in GEMMA.items() if key != "vocab_size"} | {"image_size": 28}


def test_a_part_of_a_configuration_is_merged_with_its_other_fields():
    made = load_model(None, config=GEMMA3, task="image-text-to-text", text_config={"attention_dropout": 0.1})
    text = made.config.text_config
    assert (text.attention_dropout, text.hidden_size, text.head_dim) == (0.1, 32, 8)


def test_a_keyword_sets_a_field_of_the_configuration(base):
    assert load_model(base, task="sequence-classification", num_labels=5).score.out_features == 5
    assert load_model(base, attn_implementation="eager").config._attn_implementation == "eager"
    config = AutoConfig.from_pretrained(base, attn_implementation="eager")
    assert load_model(base, config=config, use_cache=False).config._attn_implementation == "eager"
    with pytest.raises(UserError, match="'num_label' is neither an argument nor a field of a llama configuration"):
        load_model(base, num_label=5)
