"""Several samples in one sequence, each as if it were alone.

A packed sequence is samples end to end, `position_ids` starting at 0 with each of them, and no attention mask. From
that, transformers builds a block-diagonal mask for every row of the batch (eager and sdpa attention; `masking_utils.
find_packed_sequence_indices`), but only if the model hands `position_ids` to its mask, if no cache is made
(`use_cache=False`, which the collator therefore sends), and if attention is the only thing that mixes tokens. Models
with ALiBi, convolutions or recurrent states do not meet that, and nothing in transformers says so: their samples simply
see each other. So isolation is not assumed: `check_isolation` asks the model itself.

Best fit, longest first: each sample goes into the fullest sequence that still has room. It is within a few percent of
full for ordinary data and costs O(n log n). It puts samples of different lengths together, not neighbours of a file.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import torch
from torch.nn.functional import cross_entropy

from ftkit.data.tokenize import IGNORED_LABEL
from ftkit.errors import UserError
from ftkit.hf.kernels.head import usable_loss
from ftkit.hf.kernels.varlen import ATTENTION

PACKED_COLUMNS = datasets.Features(
    {name: datasets.Sequence(datasets.Value("int32")) for name in ("input_ids", "labels", "position_ids")}
    | {"place": datasets.Value("string")}
)
PROBE_TOKENS = 8
LEAK_SHARE = 0.05
"""Of what samples do to each other in one sequence: more is no rounding."""
PART_TOKENS = 128
"""Whose logits are in fp32 at once."""


def best_fit(lengths_tokens: Sequence[int], sequence_tokens: int, seed: int) -> list[list[int]]:
    """Share samples out to sequences, best fit decreasing.

    Args:
        lengths_tokens: (N,) tokens of each sample, each at most sequence_tokens
        sequence_tokens: room of a sequence, in tokens
        seed: orders samples of equal length

    Returns:
        One list of sample numbers a sequence; every sample is in exactly one.
    """
    lengths = np.asarray(lengths_tokens, dtype=np.int64)
    assert not len(lengths) or lengths.max() <= sequence_tokens, "a sample is longer than a sequence"
    shuffled = np.random.RandomState(seed % 2**32).permutation(len(lengths))
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    sequences: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of by_room that have sequences, ascending
    for number in order.tolist():
        length = int(lengths[number])
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            room, sequence = sequence_tokens, len(sequences)
            sequences.append([])
        else:
            room = rooms[at]
            sequence = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(at)
        sequences[sequence].append(number)
        left = room - length
        if left:
            if not by_room.setdefault(left, []):
                bisect.insort(rooms, left)
            by_room[left].append(sequence)
    return sequences


def fill(batch: dict[str, list], samples: datasets.Dataset) -> dict[str, list]:
    """Write the sequences of a batch: tokens, labels and restarting positions.

    Args:
        batch: column `members`, the numbers of the samples of each sequence
        samples: columns `input_ids`, `labels` and `place`, in numpy format

    Returns:
        Columns input_ids, labels and position_ids, int32, at most sequence_tokens long; and place, of all samples.
    """
    filled: dict[str, list] = {"input_ids": [], "labels": [], "position_ids": [], "place": []}
    for members in batch["members"]:
        parts = [samples[int(member)] for member in members]
        filled["input_ids"].append(np.concatenate([part["input_ids"] for part in parts]))
        labels = [np.concatenate([[IGNORED_LABEL], part["labels"][1:]]) for part in parts]
        filled["labels"].append(np.concatenate(labels))
        filled["position_ids"].append(np.concatenate([np.arange(len(part["input_ids"])) for part in parts]))
        filled["place"].append(", ".join(str(part["place"]) for part in parts))
    return filled


def boundaries_of(position_ids: torch.Tensor) -> torch.Tensor:
    """Return where the samples of packed rows end, as ftkit's attention takes it.

    Args:
        position_ids: (B, T) integers, 0 where a sample begins; what pads a row is one more.

    Returns:
        (B, 1, 1, S + 1) int32: for each row the first tokens of its samples, 0 first, then T until the row is full.
    """
    rows, tokens = position_ids.shape
    starts = [sorted({0, *row.eq(0).nonzero()[:, 0].tolist()}) for row in position_ids]
    most = max(map(len, starts)) + 1
    ends = [row + [tokens] * (most - len(row)) for row in starts]
    return torch.tensor(ends, dtype=torch.int32).view(rows, 1, 1, most)


def check_isolation(model: Any) -> None:
    """Refuse a model in which packed samples see each other, by asking it.

    Two rows are run that differ in their first sample only; the logits of the second sample must agree. How far they
    differ where the rows are one sample each says what a leak would look like.

    Args:
        model: a causal language model of transformers, on its device, sharded or not; its mode is restored

    Raises:
        UserError: the second sample saw the first; the family and its attention are named

    Cost: two forward passes of 2 × 16 tokens; with a sharded model a collective, so that all ranks must call it.
    """
    vocabulary = model.config.get_text_config().vocab_size
    numbers = torch.arange(PROBE_TOKENS)
    first, other, second = ((numbers * step + start) % vocabulary for step, start in ((7, 3), (5, 11), (3, 2)))
    ids = torch.stack([torch.cat([first, second]), torch.cat([other, second])]).to(model.device)
    packed = torch.cat([numbers, numbers]).expand(2, -1).to(model.device)
    whole = torch.arange(2 * PROBE_TOKENS).expand(2, -1).to(model.device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            leak = second_sample_difference(model, ids, packed)
            unpacked = second_sample_difference(model, ids, whole)
    except TypeError as error:
        raise refused(model, f"its forward does not take position_ids ({error})") from error
    except (ValueError, RuntimeError) as error:
        raise refused(model, str(error).splitlines()[0]) from error
    finally:
        model.train(was_training)
    if leak > LEAK_SHARE * unpacked:
        raise refused(model, f"changing one sample moves the logits of the next by {leak:.2e} (unpacked: {unpacked:.2e})")


def second_sample_difference(model: Any, ids: torch.Tensor, position_ids: torch.Tensor) -> float:
    """Return the largest difference of the two rows' logits in their second half; ids and positions are (2, 2P)."""
    rows = [_logits(model, ids[row : row + 1], position_ids[row : row + 1], PROBE_TOKENS) for row in range(2)]
    return (rows[0] - rows[1]).float().abs().max().item()


def leaks(model: Any, batch: Mapping[str, torch.Tensor]) -> float | None:
    """Return what a sample of this batch does to the next one in its row, as a share of what it would do unpacked.

    The first sample of a row is changed; the losses of the others must stay. In one unbroken sample they would move,
    which is the measure: 0 is no leak, 1 is no isolation at all.

    Args:
        model: a causal language model of transformers, on its device, sharded or not; its mode is restored
        batch: a packed batch as it is trained on, with input_ids, labels and position_ids, (B, T) each

    Returns:
        The share; None if no row has two samples with label tokens, or a change has no effect at all.

    Cost: four forward passes of one row; with a sharded model a collective, so that all ranks must call it.
    """
    row, first = _two_samples(batch)
    ids, positions = (batch[name][row : row + 1] for name in ("input_ids", "position_ids"))
    labels = batch["labels"][row, first + 1 :]
    changed = ids.clone()
    changed[:, :first] = (changed[:, :first] + 1) % model.config.get_text_config().vocab_size
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            packed, unbroken = (
                _moved(model, ids, changed, places, labels, first)
                for places in (positions, torch.arange(ids.shape[1], device=ids.device)[None])
            )
    finally:
        model.train(was_training)
    return packed / unbroken if first and unbroken > 0 else None


def _moved(
    model: Any, ids: torch.Tensor, changed: torch.Tensor, places: torch.Tensor, labels: torch.Tensor, first: int
) -> float:
    """Return how far the losses of `labels`, those from token `first` + 1 on, differ between two rows."""
    one, other = (_losses(model, each, places, labels, first) for each in (ids, changed))
    return (one - other).abs().max().item() if one.numel() else 0.0


def _two_samples(batch: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Return a row with two samples, the second with labels, and where that begins; (0, 0) if there is none."""
    for row, (positions, labels) in enumerate(zip(batch["position_ids"], batch["labels"])):
        for start in positions.eq(0).nonzero()[:, 0].tolist():
            if start and (labels[start + 1 :] != IGNORED_LABEL).any():
                return row, start
    return 0, 0


def _losses(model: Any, ids: torch.Tensor, places: torch.Tensor, labels: torch.Tensor, first: int) -> torch.Tensor:
    """Return the losses of a row's labels from token `first` + 1 on, without all logits where the model can; (1, T) ids."""
    chunked = usable_loss(model)
    if chunked is not None:
        wanted = torch.cat([labels.new_full((ids.shape[1] - len(labels),), IGNORED_LABEL), labels])[None]
        with chunked.each_token() as tokens:
            model(**_inputs(model, ids, places), labels=wanted)
        if tokens:
            return tokens[-1].losses[0, first:]
    logits = _logits(model, ids, places, first)[:-1]
    parts = zip(logits.split(PART_TOKENS), labels.split(PART_TOKENS))
    return torch.cat([cross_entropy(part.float(), own, reduction="none") for part, own in parts])


def _logits(model: Any, ids: torch.Tensor, places: torch.Tensor, first: int) -> torch.Tensor:
    """Return the logits of a row from token `first` on; ids and places are (1, T)."""
    found: torch.Tensor = model(**_inputs(model, ids, places)).logits
    return found[0, first:]


def _inputs(model: Any, ids: torch.Tensor, places: torch.Tensor) -> dict[str, Any]:
    """Return a call's arguments for one packed row; ids and places are (1, T)."""
    inputs = {"input_ids": ids, "position_ids": places, "use_cache": False}
    if getattr(model.config, "_attn_implementation", None) == ATTENTION:
        inputs["attention_mask"] = boundaries_of(places.cpu()).to(ids.device)
    return inputs


def refuse_leak(model: Any, share: float) -> None:
    """Refuse a first batch in which samples see each other.

    Args:
        model: the model, for the message.
        share: what `leaks` returned.

    Raises:
        UserError: if it is more than rounding.
    """
    if share > LEAK_SHARE:
        raise refused(model, f"in the first batch a changed sample moves the losses of the next ({share:.0%} of unpacked)")


def refused(model: Any, reason: str) -> UserError:
    """Return the error for a family that cannot be packed."""
    attention = getattr(model.config, "_attn_implementation", None)
    return UserError(
        f"data.packing: {model.config.model_type} with {attention} attention does not keep packed samples apart: "
        f"{reason}. Set data.packing: false, or attn_implementation: sdpa where another one is in use."
    )
