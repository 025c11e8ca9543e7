"""Several samples in one sequence, each as if it were alone.

A packed sequence is samples end to end, `position_ids` that start at 0 with each of them, and no attention mask. From these
positions transformers builds a block-diagonal mask (eager and sdpa attention), but only if the model passes `position_ids`
to its mask, makes no cache (`use_cache=False`, which the collator sends), and mixes tokens in attention alone. Models with
ALiBi, convolutions or recurrent states do not meet that, and transformers does not warn. So `check_isolation` asks the model
itself.

Best fit, longest first: each sample goes into the fullest sequence in which it fits, in O(n log n).
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import datasets
import numpy as np
import torch
from accelerate.utils import send_to_device

from ftkit.errors import UserError

PACKED_COLUMNS = datasets.Features(
    {name: datasets.Sequence(datasets.Value("int32")) for name in ("input_ids", "labels", "position_ids")}
    | {"place": datasets.Value("string")}
)
PLACES = "; "
"""Separates the places of packed samples."""
PROBE_TOKENS = 8
LEAK_SHARE = 0.05
"""Share of the unpacked effect of one sample on the next above which the effect is no rounding."""


def best_fit(lengths_tokens: Sequence[int], sequence_tokens: int, seed: int) -> list[list[int]]:
    """Assign samples to sequences, best fit decreasing.

    Args:
        lengths_tokens: (N,) Tokens of each sample, each at most sequence_tokens.
        sequence_tokens: Tokens of a sequence.
        seed: Orders samples of equal length.

    Returns:
        One list of sample numbers per sequence. Every sample is in exactly one.
    """
    lengths = np.asarray(lengths_tokens, dtype=np.int64)
    shuffled = np.random.RandomState(seed % 2**32).permutation(len(lengths))
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    sequences: list[list[int]] = []
    by_room: dict[int, list[list[int]]] = defaultdict(list)  # sequences that are not full, by their free tokens
    rooms: list[int] = []  # the keys of by_room that have sequences, ascending
    for number in order.tolist():
        length = int(lengths[number])
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            sequences.append([])
            room, sequence = sequence_tokens, sequences[-1]
        else:
            room = rooms[at]
            sequence = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(at)
        sequence.append(number)
        if left := room - length:
            if not by_room[left]:
                bisect.insort(rooms, left)
            by_room[left].append(sequence)
    return sequences


def fill(batch: dict[str, list], samples: datasets.Dataset) -> dict[str, list]:
    """Write the sequences of a batch: tokens, labels and restarting positions.

    Args:
        batch: Column `members`, the numbers of the samples of each sequence.
        samples: Columns `input_ids`, `labels` and `place`, in numpy format.
    """
    filled: dict[str, list] = {name: [] for name in PACKED_COLUMNS}
    for members in batch["members"]:
        parts = [samples[int(member)] for member in members]
        filled["input_ids"].append(np.concatenate([part["input_ids"] for part in parts]))
        filled["labels"].append(np.concatenate([part["labels"] for part in parts]))  # the first of a sample is -100
        filled["position_ids"].append(np.concatenate([np.arange(len(part["input_ids"])) for part in parts]))
        filled["place"].append(PLACES.join(str(part["place"]) for part in parts))
    return filled


def boundaries_of(position_ids: torch.Tensor) -> torch.Tensor:
    """Return where the samples of packed rows end, in the form that ftkit's attention takes.

    Args:
        position_ids: (B, T) integers, 0 where a sample begins; padding counts as one more sample.

    Returns:
        (B, 1, 1, S + 1) int32: for each row the first tokens of its samples, 0 first, then T until the row is full.
    """
    rows, tokens = position_ids.shape
    starts = [sorted({0, *row.eq(0).nonzero()[:, 0].tolist()}) for row in position_ids]
    most = max(map(len, starts)) + 1
    ends = [row + [tokens] * (most - len(row)) for row in starts]
    return torch.tensor(ends, dtype=torch.int32).view(rows, 1, 1, most)


def check_isolation(model: Any, collate: Callable[[list[dict]], dict[str, Any]]) -> None:
    """Refuse a model in which packed samples see each other.

    Two sequences differ in their first sample only; the logits of the second sample must agree. Their difference without
    packing is the measure of a leak.

    Args:
        model: A causal language model of transformers on its device, sharded or not. Its mode is restored.
        collate: The collator of the run, which decides how a batch says where its samples end.

    Raises:
        UserError: The second sample saw the first. Names the family and its attention.

    Cost: four forward passes of 16 tokens; with a sharded model a collective, so that all ranks must call it.
    """
    vocabulary = model.config.get_text_config().vocab_size
    numbers = torch.arange(PROBE_TOKENS)
    first, other, second = ((numbers * step + start) % vocabulary for step, start in ((7, 3), (5, 11), (3, 2)))
    packed, whole = torch.cat([numbers, numbers]), torch.arange(2 * PROBE_TOKENS)

    def difference(positions: torch.Tensor) -> float:
        logits = []
        for ids in (torch.cat([first, second]), torch.cat([other, second])):
            batch = collate([{"input_ids": ids, "labels": ids, "position_ids": positions}])
            del batch["labels"]
            inputs = send_to_device(batch, model.device)
            logits.append(model(**inputs).logits[0, PROBE_TOKENS : 2 * PROBE_TOKENS].float())
        return (logits[0] - logits[1]).abs().max().item()

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            leak, unpacked = difference(packed), difference(whole)
        reason = f"changing one sample moves the logits of the next by {leak:.2e} (unpacked: {unpacked:.2e})"
    except (TypeError, ValueError, RuntimeError) as error:  # such as a forward that does not take position_ids
        leak, unpacked, reason = 1.0, 0.0, str(error).splitlines()[0]
    finally:
        model.train(was_training)
    if leak > LEAK_SHARE * unpacked:
        raise UserError(
            f"data.packing: {model.config.model_type} with {model.config._attn_implementation} attention does not keep "
            f"packed samples apart: {reason}. Set data.packing: false, or attn_implementation: sdpa where another one is "
            "in use."
        )
