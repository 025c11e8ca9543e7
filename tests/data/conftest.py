"""A byte-level BPE tokenizer that is made here, and rows that are prepared in a folder of the test."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ftkit.config.recipe import Data, Source
from ftkit.data.prepare import prepare


@pytest.fixture(scope="session")
def trained():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the cat sat on the mat\nuser\nassistant\nthe dog sat on the cat"
    tokenizer.train_from_iterator([text] * 10, trainer)
    return tokenizer.to_str()


@pytest.fixture
def tokenizer_of(trained):
    def make(template=None, bos=False, **special):
        backend = Tokenizer.from_str(trained)
        if bos:
            backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        special = {"bos_token": "<s>", "eos_token": "</s>", **special}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
        tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.fixture
def write(tmp_path):
    def to_file(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return to_file


@pytest.fixture
def ready(write, tmp_path):
    """Prepare rows, a file, a source or several sources, with the cache in a folder of the test."""

    def prepared(rows, tokenizer, *, task="causal-lm", seed=0, held_out=None, day=None, **settings):
        sources = rows if isinstance(rows, list) and rows and isinstance(rows[0], Source) else [rows]
        if not isinstance(sources[0], Source):
            sources = [Source(path=str(rows if isinstance(rows, Path) else write(rows)))]
        settings = {"cache_dir": str(tmp_path / "cache"), "sequence_tokens": 64, "workers": 1, **settings}
        data = Data(sources=tuple(sources), **settings)
        return prepare(data, tokenizer, task=task, seed=seed, held_out=held_out, day=day)

    return prepared
