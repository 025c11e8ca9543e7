"""Chunked loss: the head and the loss of a causal language model together, so that the logits never exist as a whole.

A model computes `logits = self.lm_head(hidden)` and passes them to `self.loss_function`, which can be set. While only a loss
is wanted, the head keeps its input and returns logits of no classes. The loss function then computes the loss from the kept
input with `ftkit.kernels.linear_cross_entropy`, and with the soft cap or scale that the configuration names. In all other
calls both compute as before.

A probe proves that this fits a model: its body returns random hidden states, and its loss and gradients are compared with
those of the same probe without the replacement. If the user hooks the head or the model, the logits are computed from then
on, because a hook may read or change them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.functional import linear as linear_layer
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from ftkit.engine.core.instance_class import specialise
from ftkit.hf.adapters import base_of, may_read_logits
from ftkit.hf.kernels.probes import FAILURES, difference, linear, results, without_hooks
from ftkit.kernels.linear_cross_entropy import linear_cross_entropy
from ftkit.spec.sizes import CHUNK_BYTES

READING_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Tables in which a module keeps hooks that see its output or the gradient of it."""
HIDDEN = 8
"""Width of a probe's hidden states."""


@dataclass(frozen=True)
class TokenLosses:
    """Results for labels, each (B, T - 1): that of token t + 1 belongs to the hidden states of token t."""

    losses: Tensor  # fp32, nats; 0 for ignored labels
    hits: Tensor  # bool, whether the label was the most likely token
    counted: Tensor  # bool, whether the label is not ignored

    @property
    def rows(self) -> Tensor:
        """The sum of losses, label tokens and hits of each row, (B, 3) fp32."""
        return torch.stack([each.sum(1).float() for each in (self.losses, self.counted, self.hits)], 1)


class HeadLoss:
    """Loss function of a model, with the input that its head keeps for it.

    Args:
        head: The head, a linear layer.
        cap: Soft cap of the logits; 0 for none.
        scale: Factor on the logits, before the cap.
    """

    def __init__(self, head: nn.Linear, cap: float, scale: float) -> None:
        self.head = head
        self.cap = cap
        self.scale = scale
        self.wide = False  # compute logits in fp32, whatever the dtype of the weights
        self.wanted = False
        self.kept: Tensor | None = None
        self.tokens: list[TokenLosses] | None = None

    @contextmanager
    def each_token(self) -> Iterator[list[TokenLosses]]:
        """Collect the losses of each token in calls of the model without gradients. See `only`."""
        self.tokens = []
        try:
            with self.only():
                yield self.tokens
        finally:
            self.tokens = None

    @contextmanager
    def only(self) -> Iterator[None]:
        """Let calls of the model return a loss and logits of no classes."""
        self.wanted = True
        try:
            yield
        finally:
            self.wanted, self.kept = False, None

    def attach(self, model: PreTrainedModel) -> None:
        """Give the head its forward and the model its loss function."""
        plain, own = type(self.head).forward, self

        def forward(self: nn.Linear, input: Tensor) -> Tensor:
            if not own.wanted:
                return linear_layer(*own.operands(input)) if own.wide else plain(self, own.operands(input)[0])
            own.kept = input
            return input.new_empty(*input.shape[:-1], 0)

        specialise(self.head, forward=forward)
        model.loss_function = self

    def operands(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return hidden states, weight and bias in one dtype: the weights', or fp32 if logits overflow it."""
        weight, bias = self.head.weight, self.head.bias
        if self.wide:
            return hidden.float(), weight.float(), None if bias is None else bias.float()
        return hidden.to(weight.dtype), weight, bias

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the loss. Arguments are those of `transformers.loss.loss_utils.ForCausalLMLoss`."""
        hidden, self.kept = self.kept, None
        if hidden is None:
            return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
        if self.tokens is not None:
            noted = self._each_token(hidden[:, :-1], labels[:, 1:].to(hidden.device), ignore_index)
            self.tokens.append(noted)
            return noted.losses.sum() / (noted.counted.sum() if num_items_in_batch is None else num_items_in_batch)
        if shift_labels is None:
            shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
        flat = shift_labels.reshape(-1).to(hidden.device)
        rows, weight, bias = self.operands(hidden.reshape(-1, hidden.shape[-1]))
        total = linear_cross_entropy(
            rows, weight, flat, bias, ignore_index=ignore_index, cap=self.cap, scale=self.scale, chunk_bytes=CHUNK_BYTES
        )
        if num_items_in_batch is None:
            return total / (flat != ignore_index).sum()
        return total / (num_items_in_batch.to(total.device) if torch.is_tensor(num_items_in_batch) else num_items_in_batch)

    def _each_token(self, hidden: Tensor, labels: Tensor, ignore_index: int) -> TokenLosses:
        """Return the losses of labels (B, T) from hidden states (B, T, D), with a part of the logits at a time."""
        rows, weight, bias = self.operands(hidden.reshape(-1, hidden.shape[-1]))
        flat = labels.reshape(-1)
        losses = torch.zeros(len(flat), dtype=torch.float32, device=rows.device)
        hits = torch.zeros(len(flat), dtype=torch.bool, device=rows.device)
        step = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
        for start in range(0, len(flat), step):
            part = slice(start, start + step)
            logits = linear_layer(rows[part], weight, bias).float() * self.scale
            if self.cap:
                logits = self.cap * torch.tanh(logits / self.cap)
            losses[part] = cross_entropy(logits, flat[part], ignore_index=ignore_index, reduction="none")
            hits[part] = logits.argmax(-1) == flat[part]
        return TokenLosses(losses.view(labels.shape), hits.view(labels.shape), labels != ignore_index)


def attach_head_loss(model: nn.Module, dtype: torch.dtype, device: torch.device) -> str | None:
    """Let `model` compute its loss by chunks of logits if that agrees with its own loss; return why not, or None.

    The arguments are those of `proven_head_loss`.
    """
    found = proven_head_loss(model, dtype, device)
    if isinstance(found, str):
        return found
    found.attach(base_of(model))
    return None


def proven_head_loss(model: nn.Module, dtype: torch.dtype, device: torch.device) -> HeadLoss | str:
    """Return the chunked loss of `model` without attaching it, or why it has none.

    Args:
        model: A causal language model, or a PEFT model of one, on any device, meta included.
        dtype: Compute dtype.
        device: Compute device.

    Cost: a proof with a few rows of logits.
    """
    base = base_of(model)
    if not isinstance(base, PreTrainedModel):
        return "not a model of transformers"
    if getattr(base, "loss_type", None) not in ("ForCausalLM", None) or base.loss_function is not ForCausalLMLoss:
        return "its loss is not that of a causal language model"
    head = base.get_output_embeddings()
    if type(head) is not nn.Linear:
        return "its head is not a linear layer" if head is not None else "it has no head"
    if _logits_are_read(model, head):
        return "its logits may be read by a hook, by a forward of the instance or by its adapter"
    config = base.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None) or 0.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    scale = (getattr(config, "logit_scale", None) or 1.0) / divisor
    if not _agrees(base, head, cap, scale, dtype, device):
        return "its loss depends on more than its head"
    return HeadLoss(head, cap, scale)


def _logits_are_read(model: nn.Module, head: nn.Module) -> bool:
    """Return whether something outside the proof may read or change logits. Hooks may come at any time."""
    around = (model, base_of(model), head)
    hooks = [hook for each in around for kind in READING_HOOKS for hook in vars(each)[kind].values()]
    users = any(not str(getattr(hook, "__module__", "")).startswith("ftkit.") for hook in hooks)  # ours cope without logits
    return users or any("forward" in vars(each) for each in around) or may_read_logits(model)


def head_loss(model: nn.Module) -> HeadLoss | None:
    """Return the chunked loss that is attached to a model; `usable_loss` says whether it may be used now."""
    # The public getter of `loss_function` warns for models without a loss type.
    found = getattr(base_of(model), "_loss_function", None)
    return found if isinstance(found, HeadLoss) else None


def usable_loss(model: nn.Module) -> HeadLoss | None:
    """Return the chunked loss of a model; None if it has none or if its logits may be read."""
    found = head_loss(model)
    return found if found is not None and not _logits_are_read(model, found.head) else None


def only_loss(model: nn.Module, *, wanted: bool) -> Any:
    """Return a context in which the model computes no logits if `wanted` and possible."""
    found = usable_loss(model) if wanted else None
    return nullcontext() if found is None else found.only()


class _Body(nn.Module):
    """Replaces everything below the head of a probe, and returns the hidden states that are given to all of them."""

    def __init__(self, original: nn.Module, given: list[Tensor], depth: int = 2) -> None:
        super().__init__()
        self.given = given
        if depth:  # some models call a part of their body
            self._modules.update({name: _Body(child, given, depth - 1) for name, child in original.named_children()})

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPastAndCrossAttentions:
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.given[0])


def _agrees(
    base: PreTrainedModel, head: nn.Linear, cap: float, scale: float, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether a probe of the model, in training mode, has the same loss and gradients by chunks."""
    generator = Generator().manual_seed(0)
    classes = head.weight.shape[0]
    own_head = linear(classes, HIDDEN, generator, bias=head.bias is not None)
    hidden = 3 * torch.randn(2, 5, HIDDEN, generator=generator)
    labels = torch.randint(0, classes, (2, 5), generator=generator)
    labels[0, :2] = -100
    cpu = torch.device("cpu")

    def run(chunked: bool, where: torch.device, of: torch.dtype) -> dict[str, Tensor]:
        given: list[Tensor] = []
        probe: Any = without_hooks(base)
        probe_head = copy.deepcopy(own_head).to(where, of)
        children = {name: probe_head if each is head else _Body(each, given) for name, each in base.named_children()}
        probe.__dict__["_modules"] = children
        probe.train()
        if chunked:
            HeadLoss(probe_head, cap, scale).attach(probe)

        def loss(states: Tensor) -> Any:
            given[:] = [states]
            ids, own = labels.clamp(min=0).to(where), labels.to(where)
            with only_loss(probe, wanted=True):
                return probe(input_ids=ids, labels=own, num_items_in_batch=torch.tensor(7)).loss

        return results(loss, {"hidden": hidden.to(dtype).to(where, of)}, dict(probe_head.named_parameters()))

    try:
        if device.type != "cpu":  # a model that reads logits finds no classes, which a GPU answers with an assertion
            run(True, cpu, torch.float32)
        return difference(run(True, device, dtype), run(False, device, dtype), run(False, cpu, torch.float64)) is not None
    except FAILURES:
        return False
