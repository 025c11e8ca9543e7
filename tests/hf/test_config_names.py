"""Names that are given to transformers match something: fields of an inline configuration, special tokens."""

import json

import pytest

from ftkit.config.recipe import Model
from ftkit.data.rendering import Rendering
from ftkit.errors import UserError
from ftkit.hf.models.model_config import read_config
from ftkit.hf.weights.loading import generation_config, load_model
from ftkit.train.answers import load
from ftkit.train.run_rows import load_tokenizer
from tests.tiny import make_base, make_tokenizer

LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
LLAMA |= {"num_attention_heads": 4}


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"num_key_value_head": 2}, "model.config.num_key_value_head: .*did you mean 'num_key_value_heads'"),
        ({"hiden_size": 64}, "did you mean 'hidden_size'"),
        ({"rms_eps": 1e-5}, "did you mean 'rms_norm_eps'"),
        ({"zzz": 1}, "a configuration of llama has no such field; transformers"),
        ({"rope_parameters": {"rope_type": "default", "rope_thetta": 1e4}}, "rope_parameters.rope_thetta: .*'rope_theta'"),
        ({"rope_scaling": {"type": "linear", "factr": 2.0}}, "rope_scaling.factr: .*did you mean 'factor'"),
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


@pytest.mark.parametrize("fields", [{}, {"rope_theta": 5e5, "tie_word_embeddings": True}, {"attention_bias": True}])
def test_fields_that_transformers_reads_are_fine(fields):
    assert load_model(None, config={**LLAMA, **fields}).config.hidden_size == 32


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"hidden_sise": 64}, r"config.json.hidden_sise: .*did you mean 'hidden_size'"),
        ({"num_attention_head": 2}, "did you mean 'num_attention_heads'"),
        ({"max_position_embedings": 64}, "did you mean 'max_position_embeddings'"),
        ({"rope_parameters": {"rope_type": "default", "rope_thetta": 1e4}}, "rope_parameters.rope_thetta: .*'rope_theta'"),
    ],
)
def test_a_field_of_a_file_that_is_nearly_one_stops(tmp_path, fields, meant):
    kept = {key: value for key, value in LLAMA.items() if f"'{key}'" not in meant}
    (tmp_path / "config.json").write_text(json.dumps(kept | fields))
    for config in (str(tmp_path / "config.json"), str(tmp_path)):
        with pytest.raises(UserError, match=meant):
            load_model(None, config=config)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"rms_norm_epss": 0.1}, "did you mean 'rms_norm_eps'"),
        ({"attention_dropot": 0.5}, "did you mean 'attention_dropout'"),
        ({"rms_norm_epss": 0.1, "rms_norm_eps": 0.1}, "read by nobody: rms_norm_epss"),
        ({"n_ctx": 8}, ""),
    ],
)
def test_a_field_of_a_models_own_folder_that_is_nearly_one_is_told(tmp_path, caplog, fields, told):
    load_model(None, config=LLAMA, dtype="float32").config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    kept = {name: value for name, value in json.loads(file.read_text()).items() if f"'{name}'" not in told}
    file.write_text(json.dumps(kept | fields))
    assert read_config(str(tmp_path), None).hidden_size == 32
    assert told in caplog.text
    assert bool(told) == ("config.json" in caplog.text)


def test_a_field_of_a_file_that_resembles_none_is_told(tmp_path, caplog):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "n_ctx": 8, "architectures": ["LlamaForCausalLM"], "use_cache": False}))
    assert load_model(None, config=str(path)).config.hidden_size == 32
    assert "read by nobody: n_ctx" in caplog.text


def test_a_key_that_a_file_has_twice_stops(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA)[:-1] + ', "hidden_size": 64}')
    with pytest.raises(UserError, match=r"config\.json: has the key 'hidden_size' twice"):
        load_model(None, config=str(path))


@pytest.mark.parametrize("name", ["eos_token", "pad_token", "bos_token", "unk_token"])
def test_a_special_token_that_no_vocabulary_has_stops(tmp_path, name):
    make_tokenizer(tmp_path)
    assert load_tokenizer(Model(name=str(tmp_path))).eos_token == "<end>"
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: "<edn>"}))
    with pytest.raises(UserError, match=rf"the tokenizer's {name} '<edn>' is in no vocabulary; did you mean '<end>'"):
        load_tokenizer(Model(name=str(tmp_path)))


@pytest.mark.parametrize(
    "changes",
    [{"rope_theta": 5e5}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"rope_parameters": {"factor": 2.0}}],
)
def test_a_part_of_a_rotation_that_nobody_reads_stops(changes):
    with pytest.raises(UserError, match=r"give rope_parameters=\{.*'rope_theta': (500000|10000)\.0"):
        load_model(None, config=LLAMA, **changes)
    whole = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    assert load_model(None, config=LLAMA, rope_parameters=whole).config.rope_parameters == whole


@pytest.mark.parametrize(
    ("field", "meant"),
    [("rms_norm_epz", "'rms_norm_eps'"), ("num_layer", ""), ("device_map", ""), ("quantization_config", "")],
)
def test_a_field_set_beside_a_configuration_must_be_one(field, meant):
    with pytest.raises(UserError, match=rf"load_model.{field}: a configuration of llama has no such field.*{meant}"):
        load_model(None, config=LLAMA, **{field: 1})
    assert load_model(None, config=LLAMA, num_hidden_layers=2).config.num_hidden_layers == 2
    assert load_model(None, config=LLAMA, attn_implementation="eager").config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("name", "meant"), [("eos_tokn", None), ("chat_tmplate", "chat_template"), ("model_max_lenght", "model_max_length")]
)
def test_a_field_of_a_tokenizer_that_is_nearly_one_stops(tmp_path, name, meant):
    make_tokenizer(tmp_path, None)
    path = tmp_path / "tokenizer_config.json"
    facts = json.loads(path.read_text())
    facts.pop(meant, None)
    facts.pop("eos_token", None)
    path.write_text(json.dumps({**facts, name: "<end>", "sp_model_kwargs": {}, "image_token": "<end>"}))
    with pytest.raises(UserError, match=rf"'{name}' is not read; did you mean '{meant or 'eos_token'}'"):
        load_tokenizer(Model(name=str(tmp_path)))


def test_two_chat_templates_that_differ_stop(tmp_path):
    make_tokenizer(tmp_path)
    template = (tmp_path / "chat_template.jinja").read_text()
    path = tmp_path / "tokenizer_config.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "chat_template": template}))
    load_tokenizer(Model(name=str(tmp_path)))
    path.write_text(json.dumps({**facts, "chat_template": "{{ messages }}"}))
    with pytest.raises(UserError, match="two chat templates that differ"):
        load_tokenizer(Model(name=str(tmp_path)))


def test_a_revision_of_what_has_none_stops(tmp_path):
    with pytest.raises(ValueError, match="found `revision`, which is of a hub id"):
        Model(name=str(tmp_path), revision="v2")
    with pytest.raises(UserError, match="revision='v2' is of a hub name"):
        load_model(tmp_path, revision="v2")
    assert Model(name="some/model", revision="v2").revision == "v2"


def test_a_field_that_a_configuration_derives_from_others_is_one():
    made = load_model(None, config=LLAMA, task="sequence-classification", num_labels=5)
    assert made.score.out_features == 5
    assert load_model(None, config={**LLAMA, "num_labels": 4}, task="sequence-classification").score.out_features == 4
    with pytest.raises(UserError, match="did you mean 'num_labels'"):
        load_model(None, config=LLAMA, num_label=5)
def changed(folder, name="tokenizer_config.json", **fields):
    path = folder / name
    facts = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**facts, **fields}))


def refused(folder):
    with pytest.raises(UserError) as stop:
        load_tokenizer(Model(name=str(folder)))
    return str(stop.value)


@pytest.mark.parametrize("name", ["eos_tokn", "eos_tokne", "chat_tmplate", "model_max_lenght", "padding_sid"])
def test_a_field_of_a_tokenizer_that_is_nearly_one_stops_beside_that_one(tmp_path, name):
    make_tokenizer(tmp_path)
    template = (tmp_path / "chat_template.jinja").read_text()
    changed(tmp_path, model_max_length=64, padding_side="left", chat_template=template)
    changed(tmp_path, boi_token="<begin>", eos_token_id=2, image_token="<end>")
    load_tokenizer(Model(name=str(tmp_path)))
    changed(tmp_path, **{name: "<pad>"})
    assert f"{name!r} is not read; did you mean" in refused(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_key_of_a_tokenizer_file_with_two_values_stops(tmp_path, name):
    make_tokenizer(tmp_path)
    path = tmp_path / name
    facts = path.read_text() if path.is_file() else "{}"
    facts = json.dumps({**json.loads(facts), "eos_token": "<end>"})
    path.write_text(facts[:-1] + ', "eos_token": "<end>"}')
    assert load_tokenizer(Model(name=str(tmp_path))).eos_token == "<end>"
    path.write_text(path.read_text()[:-1] + ', "eos_token": "<pad>"}')
    assert f"{name}: has the key 'eos_token' twice" in refused(tmp_path)


def test_a_special_tokens_map_agrees_with_the_configuration(tmp_path):
    make_tokenizer(tmp_path)
    changed(tmp_path, "special_tokens_map.json", eos_token={"content": "<end>", "lstrip": False}, bos_token="<begin>")
    load_tokenizer(Model(name=str(tmp_path)))
    changed(tmp_path, "special_tokens_map.json", eos_token="<pad>")
    told = refused(tmp_path)
    assert "tokenizer_config.json has the eos_token '<end>', and special_tokens_map.json '<pad>'" in told
    changed(tmp_path, added_tokens_decoder={"2": {"content": "<end>", "special": True}})
    assert load_tokenizer(Model(name=str(tmp_path))).eos_token == "<end>"  # the map is not read


def test_a_misspelt_field_of_a_special_tokens_map_stops(tmp_path):
    make_tokenizer(tmp_path)
    changed(tmp_path, "special_tokens_map.json", eos_tokne="<pad>")
    assert "special_tokens_map.json: 'eos_tokne' is not read; did you mean 'eos_token'" in refused(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("name", ["extra_special_tokens", "additional_special_tokens"])
def test_a_further_special_token_that_no_vocabulary_has_stops(tmp_path, name, file):
    make_tokenizer(tmp_path)
    changed(tmp_path, file, **{name: ["<end>", "<pad>"]})
    load_tokenizer(Model(name=str(tmp_path)))
    changed(tmp_path, file, **{name: ["<end>", "<padd>"]})
    assert f"the tokenizer's {name} '<padd>' is in no vocabulary; did you mean '<pad>'" in refused(tmp_path)


def test_named_chat_templates_that_are_not_read_stop(tmp_path):
    make_tokenizer(tmp_path)
    template = (tmp_path / "chat_template.jinja").read_text()
    changed(tmp_path, chat_template=[{"name": "default", "template": template}])
    load_tokenizer(Model(name=str(tmp_path)))
    changed(tmp_path, chat_template=[{"name": "default", "template": "{{ messages }}"}])
    assert "two chat templates that differ: chat_template.jinja, which" in refused(tmp_path)
    named = [{"name": "default", "template": template}, {"name": "rag", "template": template}]
    changed(tmp_path, chat_template=named)
    assert "the chat template 'rag' in tokenizer_config.json is not read" in refused(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    assert set(load_tokenizer(Model(name=str(tmp_path))).chat_template) == {"default", "rag"}


def test_chat_templates_without_a_default_are_named(tmp_path):
    make_tokenizer(tmp_path, None)
    changed(tmp_path, chat_template=[{"name": "rag", "template": "{{ messages }}"}])
    tokenizer = load_tokenizer(Model(name=str(tmp_path)))
    with pytest.raises(UserError, match=r"has chat templates named 'rag' and none named 'default'"):
        Rendering.of(tokenizer)


@pytest.mark.parametrize("file", ["chat-template.jinja", "chat_template.json"])
def test_a_chat_template_in_a_file_that_is_not_read_stops(tmp_path, file):
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").rename(tmp_path / file)
    assert f"the tokenizer has no chat template, and {file} is not read" in refused(tmp_path)
    (tmp_path / file).unlink()
    assert load_tokenizer(Model(name=str(tmp_path))).chat_template is None


@pytest.mark.parametrize(
    ("written", "meant"),
    [({"eos_token_idd": 2}, "eos_token_id"), ({"temprature": 0.5}, "temperature"), ({"max_new_token": 4}, "max_new_tokens")],
)
def test_a_misspelled_field_of_a_generation_configuration_stops(written, meant, tmp_path):
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(written))
    with pytest.raises(UserError, match=f"{next(iter(written))!r}, which is not read; did you mean {meant!r}"):
        generation_config(tmp_path, config=LLAMA)
    file.write_text(json.dumps({meant: next(iter(written.values()))}))
    generation_config(tmp_path, config=LLAMA)


@pytest.mark.parametrize("marked", [False, True])
def test_a_generation_configuration_is_read_where_transformers_drops_fields(tmp_path, marked):
    make_base(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"_from_model_config": marked, "eos_token_id": 2, "temprature": None}))
    with pytest.raises(UserError, match="'temprature', which is not read; did you mean 'temperature'"):
        load_model(tmp_path)
    with pytest.raises(UserError, match="'temprature', which is not read; did you mean 'temperature'"):
        load(str(tmp_path))
    file.write_text(json.dumps({"_from_model_config": marked, "eos_token_id": 2}))
    assert load_model(tmp_path).generation_config.eos_token_id == 2
    assert load(str(tmp_path))[0].generation_config.eos_token_id == 2


GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64}
T5 = {"model_type": "t5", "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
GEMMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
GEMMA3 = {"model_type": "gemma3", "text_config": {**GEMMA, "num_key_value_heads": 2, "head_dim": 8}}
GEMMA3["vision_config"] = {key: value for key, value in GEMMA.items() if key != "vocab_size"} | {"image_size": 28}


@pytest.mark.parametrize("field", [{"rope_theta": 1e6}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}])
def test_a_rotation_of_a_class_that_has_none_stops(field):
    (name,) = field
    with pytest.raises(UserError, match=rf"model\.config\.{name}: a configuration of gpt2 has no such field"):
        load_model(None, config={**GPT2, **field})
    with pytest.raises(UserError, match=rf"load_model\.{name}: a configuration of gpt2 has no such field"):
        load_model(None, config=GPT2, **field)
    assert load_model(None, config={**LLAMA, **field}).config.rope_parameters["rope_theta"]


def test_a_token_of_generation_that_a_class_has_no_field_for_stops(tmp_path):
    make_base(tmp_path)
    with pytest.raises(UserError, match=r"load_model\.forced_bos_token_id: .*Write it there"):
        load_model(tmp_path, forced_bos_token_id=9)
    with pytest.raises(UserError, match=r"load_model\.decoder_start_token_id: .*generation_config\.json"):
        load_model(tmp_path, decoder_start_token_id=1)
    with pytest.raises(UserError, match=r"model\.config\.forced_bos_token_id: .*generation_config\.json"):
        load_model(None, config={**LLAMA, "forced_bos_token_id": 9})
    assert load_model(tmp_path, eos_token_id=7).config.eos_token_id == 7
    assert load_model(None, config={**LLAMA, "decoder_start_token_id": 1}).generation_config.decoder_start_token_id == 1
    assert load_model(None, config={**LLAMA, "forced_bos_token_id": None}).config.hidden_size == 32
    assert load_model(None, config=T5, decoder_start_token_id=0).config.decoder_start_token_id == 0


def test_a_part_of_a_configuration_is_merged_with_what_is_there():
    task = {"task": "image-text-to-text"}
    made = load_model(None, config=GEMMA3, text_config={"attention_dropout": 0.1}, **task).config.text_config
    assert (made.attention_dropout, made.hidden_size, made.head_dim) == (0.1, 32, 8)
    with pytest.raises(UserError, match=r"load_model\.text_config\.attention_dropot: .*'attention_dropout'"):
        load_model(None, config=GEMMA3, text_config={"attention_dropot": 0.1}, **task)
    with pytest.raises(UserError, match=r"load_model\.text_config: .*give rope_parameters=\{'(full|sliding)_attention'"):
        load_model(None, config=GEMMA3, text_config={"rope_theta": 5e5}, **task)
    with pytest.raises(UserError, match=r"load_model\.rope_theta: a configuration of gemma3 has no such field"):
        load_model(None, config=GEMMA3, rope_theta=5e5, **task)


def test_a_field_of_a_generation_configuration_that_resembles_none_is_named(tmp_path, caplog):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "house_style": 1}))
    assert generation_config(tmp_path, config=LLAMA).eos_token_id == 2
    assert "fields that are not read: house_style" in caplog.text
