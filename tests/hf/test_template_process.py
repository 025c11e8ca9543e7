"""Chat templates of strangers: they end, or are ended, and whatever they raise is a sentence."""

import os
import pickle
import time

import pytest
from transformers import AutoTokenizer

from ftkit.data import template_process
from ftkit.data.formats import BadRowError, Conversation
from ftkit.data.prepared import prepare
from ftkit.data.rendering import Rendering
from ftkit.errors import UserError
from ftkit.hf.inference.generation import prompt_ids

TURNS = ({"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"})
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}"
ENDLESS = [
    LOOPS,
    "{% generation %}" + LOOPS + "{% endgeneration %}",
    "{{ 'a' * 6000000000 }}",  # computed when it is compiled
    "{{ messages[0].content * 3000000000 }}",
    "{% set ns = namespace(t='aaaaaaaa') %}{% for i in range(40) %}{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}",
    "{{ '%9999999999s' % 'a' }}",
    "{{ 9 ** (9 ** 9) }}",
]
RAISING = [
    "{{ 1/0 }}",
    "{{ messages[0].content / 0 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for i in range(10**12) %}{% endfor %}",
    "{{ 'a'.index('b') }}",
    "{{ messages.missing.deeper }}",
    "{{ messages[0]['content'] + 3 }}",
    "{{ raise_exception('roles must alternate') }}",
    "{{ messages | map(attribute='x') | sum }}",
    "{{ ''.join(messages) }}",
    "{{ [].pop() }}",
    "{% if %}",
    "{{ messages[0].content.encode('ascii').decode('utf-16') }}",
    "{{ int }}{{ messages.append(1) }}",
]


@pytest.fixture(scope="module")
def tokenizer(home):
    return AutoTokenizer.from_pretrained(home / "base")


def with_template(tokenizer, template):
    tokenizer = pickle.loads(pickle.dumps(tokenizer))
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.quick(3)
@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_without_end_or_measure_is_named(tokenizer, template, monkeypatch):
    monkeypatch.setattr(template_process, "SECONDS", 1)
    monkeypatch.setattr(template_process, "MEMORY_BYTES", 512 << 20)
    bad, began = with_template(tokenizer, template), time.monotonic()
    told = r"the chat template of .*base (does not end|takes more|makes a text|refuses it)"
    with pytest.raises((UserError, BadRowError), match=told):
        Rendering.of(bad).conversation(Conversation(TURNS))
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("template", RAISING)
def test_whatever_a_template_raises_is_an_error_of_its_row(tokenizer, template):
    bad = with_template(tokenizer, template)
    for find_answers in (True, False):
        with pytest.raises((UserError, BadRowError), match=r"the chat template of .*base (refuses it|leaves out)"):
            Rendering.of(bad).conversation(Conversation(TURNS), find_answers=find_answers)


@pytest.mark.parametrize("seq2seq", [False, True])
def test_a_prompt_that_the_template_refuses_is_an_error_of_the_user(tokenizer, seq2seq):
    with pytest.raises(UserError, match=r"the chat template of .*base refuses it: ZeroDivisionError"):
        prompt_ids(with_template(tokenizer, "{{ 1/0 }}"), TURNS[:1], seq2seq=seq2seq)


def test_a_bad_template_names_the_row_and_stops_the_preparation(tokenizer, home, tmp_path):
    bad = with_template(tokenizer, "{{ 1/0 }}")
    with pytest.raises(UserError, match=r"rows\.jsonl:1: the chat template of .* refuses it: ZeroDivisionError"):
        prepare(home / "rows.jsonl", bad, sequence_tokens=32, cache_dir=tmp_path)


def test_texts_and_marks_are_those_that_transformers_makes(tokenizer):
    rendering = Rendering.of(tokenizer)
    turns = list(TURNS)
    assert rendering.process.text(turns, None, ask=True) == tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    marked = with_template(
        tokenizer, "{% for m in messages %}{% generation %}{{ m.content }}é{% endgeneration %}{% endfor %}"
    )
    assert Rendering.of(marked).process.marked(turns, None) == ("1+1?é2é", [(0, 5), (5, 7)])


def test_the_process_ends_with_its_rendering_and_is_not_shared(tokenizer):
    rendering = Rendering.of(tokenizer)
    rendering.conversation(Conversation(TURNS))
    pid = rendering.process._pid
    os.kill(pid, 0)
    copy = pickle.loads(pickle.dumps(rendering))
    assert copy.conversation(Conversation(TURNS)) == rendering.conversation(Conversation(TURNS))
    assert copy.process._pid != pid
    del rendering
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
