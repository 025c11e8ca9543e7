"""Whatever stands in a model's config.json: an error that names the file and, where that can be known, the key."""

import json

import pytest

from ftkit.errors import UserError
from ftkit.hf.weights.loading import load_model
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
        ("num_attention_heads", "4"),
        ("hidden_size", 2**62),
        ("vocab_size", -1),
        ("num_hidden_layers", 10**12),
        ("rope_parameters", {"rope_type": "nope"}),
        ("model_type", "nope"),
    ],
)
def test_a_value_that_no_model_can_be_made_of_is_named(folder, base, key, value):
    text = told(folder, fields_of(base, **{key: value}))
    assert str(folder) in text
    assert key in text or key == "model_type", text


@pytest.mark.parametrize("content", ["", "[]", "{}", "[" * 100_000])
def test_a_file_that_is_no_configuration(folder, content):
    assert str(folder) in told(folder, content)


def test_an_error_of_our_own_is_not_taken_for_the_users(monkeypatch, base):
    monkeypatch.setattr("ftkit.hf.weights.loading.find_weights", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load_model(base)
