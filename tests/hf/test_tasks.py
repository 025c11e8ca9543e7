"""`load_model` builds the class that a folder names: each task gives from_pretrained's model, logits and first step.

A head that the folder lacks begins as transformers draws it, with the same random numbers. A block that the folder lacks is
refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import ftkit
from ftkit.hf.load.tasks import TASKS
from tests.hf import runs
from tests.hf.test_before_sharding import SETTINGS

WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**WIDTHS, "vocab_size": runs.VOCABULARY, "max_position_embeddings": 64}
IDS = torch.arange(3, 23).view(2, 10)


def bert(**changes: Any) -> Any:
    return transformers.BertConfig(**TEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **changes)


def wav2vec() -> Any:
    off = (
        "hidden_dropout",
        "activation_dropout",
        "attention_dropout",
        "feat_proj_dropout",
        "layerdrop",
        "final_dropout",
    )
    return transformers.Wav2Vec2Config(
        **WIDTHS,
        vocab_size=20,
        conv_dim=(16, 16),
        conv_stride=(4, 4),
        conv_kernel=(8, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        **dict.fromkeys(off, 0.0),
    )


def whisper() -> Any:
    return transformers.WhisperConfig(
        vocab_size=runs.VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )


def vit() -> Any:
    return transformers.ViTConfig(
        **WIDTHS, image_size=16, patch_size=8, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )


def llava() -> Any:
    vision = transformers.CLIPVisionConfig(**WIDTHS, image_size=16, patch_size=8, projection_dim=16)
    text = transformers.LlamaConfig(**TEXT, num_key_value_heads=2)
    return transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=96, image_seq_length=4)


LABELS = torch.tensor([1, 2])
CASES: dict[str, tuple[Any, dict[str, Tensor]]] = {
    "causal-lm": (runs.llama().config, {"input_ids": IDS, "labels": IDS}),
    "seq2seq": (runs.t5().config, {"input_ids": IDS, "labels": IDS}),
    "masked-lm": (bert(), {"input_ids": IDS, "labels": IDS}),
    "sequence-classification": (bert(num_labels=3), {"input_ids": IDS, "labels": LABELS}),
    "token-classification": (bert(num_labels=3), {"input_ids": IDS, "labels": IDS % 3}),
    "question-answering": (bert(), {"input_ids": IDS, "start_positions": LABELS, "end_positions": LABELS + 3}),
    "image-text-to-text": (
        llava(),
        {"input_ids": torch.tensor([[3, 96, 96, 96, 96, 5]]), "labels": torch.tensor([[3, -100, -100, -100, -100, 5]])}
        | {"pixel_values": torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16)},
    ),
    "image-classification": (
        vit(),
        {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 256).view(2, 3, 16, 16), "labels": LABELS},
    ),
    "speech-ctc": (
        wav2vec(),
        {"input_values": torch.sin(torch.arange(2 * 800.0)).view(2, 800), "labels": IDS[:, :4] % 19 + 1},
    ),
    "speech-seq2seq": (
        whisper(),
        {"input_features": torch.sin(torch.arange(2 * 8 * 32.0)).view(2, 8, 32), "labels": IDS},
    ),
}


def save(config: Any, task: str, folder: Any) -> str:
    """Write a folder of a task's model, its weights drawn wide."""
    torch.manual_seed(5)
    model = getattr(transformers, TASKS[task]).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    model.save_pretrained(folder)
    return str(folder)


def stepped(model: Any, inputs: dict[str, Tensor], scale: Any, optimizer: Any) -> tuple[float, Tensor]:
    """Make one step; return its loss and the logits after it."""
    out = model.train()(**inputs)
    scale(out.loss).backward()
    optimizer.step()
    with torch.no_grad():
        after = model.eval()(**inputs)
    logits = getattr(after, "logits", None)
    return float(out.loss.detach()), after.start_logits if logits is None else logits


def ours(folder: str, task: str, inputs: dict[str, Tensor]) -> tuple[str, float, Tensor]:
    """A case for a world: every rank has the same rows, so that the mean over ranks is that of one."""
    model = ftkit.load_model(folder, task=task)
    units = ftkit.shard(model, SETTINGS)
    optimizer = ftkit.ShardedAdamW(units, lr=1e-3, eps=1e-3, weight_decay=0.0)
    return type(model).__name__, *stepped(model, inputs, optimizer.scale, optimizer)


def check(task: str, named: str, world: Any, folder: Any) -> None:
    config, inputs = CASES[task]
    path = save(config, task, folder)
    model = getattr(transformers, TASKS[task]).from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.0)
    loss, logits = stepped(model, inputs, lambda each: each, optimizer)
    for kind, own, after in world.run(ours, path, named, inputs):
        assert kind == type(model).__name__
        assert own == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(after, logits, rtol=1e-3, atol=1e-4)


@pytest.mark.quick(2)
@pytest.mark.parametrize("task", ["sequence-classification", "question-answering", "speech-ctc", "image-text-to-text"])
def test_a_folder_becomes_what_its_architectures_name(task, world2, tmp_path):
    check(task, "auto", world2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("named", ["auto", "by name"])
@pytest.mark.parametrize("task", CASES)
def test_every_task_is_that_of_from_pretrained(task, named, world2, tmp_path):
    check(task, "auto" if named == "auto" else task, world2, tmp_path)


@pytest.mark.parametrize("task", ["sequence-classification", "token-classification", "question-answering"])
def test_a_head_that_the_folder_lacks_begins_as_transformers_draws_it(task, world2, tmp_path):
    save(bert(num_labels=3), "feature-extraction", tmp_path)
    torch.manual_seed(21)
    theirs = getattr(transformers, TASKS[task]).from_pretrained(tmp_path)
    for weights in world2.run(begun, str(tmp_path), task):
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(weights[name], tensor), name


def begun(folder: str, task: str) -> dict[str, Tensor]:
    """A case for a world: ranks draw other random numbers, and rank 0's head counts."""
    torch.manual_seed(21 + runs.rank())
    units = ftkit.shard(ftkit.load_model(folder, task=task), {"stage": 3})
    return units.state_dict()


def test_a_block_that_the_folder_lacks_is_refused(tmp_path):
    save(bert(), "masked-lm", tmp_path)
    with pytest.raises(ftkit.UserError, match=r"lacks bert\.encoder\.layer\.2\..* the folder is incomplete"):
        ftkit.load_model(tmp_path, task="masked-lm", num_hidden_layers=3)


def test_a_task_that_does_not_follow_is_asked_for(tmp_path):
    save(bert(), "feature-extraction", tmp_path)
    with pytest.raises(ftkit.UserError, match=r"architectures is \[BertModel\].*set task to .*sequence-classification"):
        ftkit.load_model(tmp_path)
    assert type(ftkit.load_model(tmp_path, task="feature-extraction")).__name__ == "BertModel"
    with pytest.raises(ftkit.UserError, match="task is 'chat', one of auto, causal-lm"):
        ftkit.load_model(tmp_path, task="chat")
    with pytest.raises(ftkit.UserError, match=r"BertConfig.* for this kind of AutoModel: AutoModelForCTC"):
        ftkit.load_model(tmp_path, task="speech-ctc")
