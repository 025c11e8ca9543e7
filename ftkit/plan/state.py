"""The stores of a flat parameter's optimizer state on one rank, as the engine allocates them.

[Note: the stores]   S elements of a shard; M > 0: the flat parameter has matrices whose moments can be coded

    master            S fp32, or none where fp32 weights are their own master
    residual          S int16 instead of the master: with `master: split`, for 16-bit weights where the state is updated
    each moment       S fp32; of an 8-bit rule, if M > 0: codes, scales and plain (`ftkit.spec.state_forms`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ftkit.plan.shape import Flat, Placed, Shape
from ftkit.spec.sizes import PIECE_NUMEL
from ftkit.spec.state_forms import GROUP_NUMEL, CodedSizes
from ftkit.spec.strategy import Strategy
from ftkit.spec.tiers import DEVICE, NVME, Tier
from ftkit.spec.update_rules import FP32_BYTES, NARROW_BYTES, UpdateRule


@dataclass(frozen=True)
class StateStore:
    """One store: its role in an update, its elements and their bytes, and the elements of it that a piece has at most."""

    role: str
    numel: int
    itemsize: int = FP32_BYTES
    piece_numel: int = PIECE_NUMEL

    @property
    def size_bytes(self) -> int:
        """Bytes of the store."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class State:
    """The optimizer state of a trained flat parameter.

    Args:
        masters: The master or residual, if any.
        moments: The stores of all moments.
        own_master: fp32 weights are the master.
    """

    masters: tuple[StateStore, ...]
    moments: tuple[StateStore, ...]
    own_master: bool

    @property
    def stores(self) -> tuple[StateStore, ...]:
        """All stores."""
        return self.masters + self.moments

    @property
    def size_bytes(self) -> int:
        """Bytes of all stores."""
        return total_bytes(self.stores)

    @property
    def reads_weights(self) -> bool:
        """Whether an update reads the weights, as the master or a half of it."""
        return self.own_master or any(store.role == "residual" for store in self.masters)


def state_of(shape: Shape, strategy: Strategy, placed: Placed, *, cpu: bool) -> State:
    """Return the state of a flat parameter on a rank. None of its stores exists if it is not trained."""
    flat, owners = placed.flat, strategy.owners(shape.world_size)
    if not flat.trained:
        return State((), (), own_master=False)
    beside = _beside_weights(placed, strategy, shape.world_size, cpu=cpu)
    own, numel = beside and flat.itemsize == FP32_BYTES, flat.shard_numel(owners)
    split = beside and flat.itemsize == NARROW_BYTES and strategy.master == "split"
    masters = (StateStore("residual", numel, NARROW_BYTES) if split else StateStore("master", numel),)
    return State(() if own else masters, _moments(shape.rule, flat, owners), own_master=own)


def states_bytes(shape: Shape, strategy: Strategy, *, cpu: bool) -> int:
    """Return the bytes of the state of all flat parameters on all ranks."""
    own = sum(state_of(shape, strategy, placed, cpu=cpu).size_bytes * count for placed, count in shape.counted)
    return own * shape.world_size


def forms_of(shape: Shape, strategy: Strategy, *, cpu: bool) -> list[str]:
    """Return the forms of the state that are not fp32, for a reader."""
    states = [state_of(shape, strategy, placed, cpu=cpu) for placed, _ in shape.counted]
    roles = {store.role for state in states for store in state.stores}
    coded = any(role.endswith(".codes") for role in roles)
    return ["8-bit moments"] * coded + ["split master"] * ("residual" in roles)


def total_bytes(stores: Sequence[StateStore]) -> int:
    """Return the bytes of some stores."""
    return sum(store.size_bytes for store in stores)


def weights_tier(placed: Placed, strategy: Strategy, world_size: int) -> Tier:
    """Return the tier from which an update takes a flat parameter's weights."""
    return DEVICE if strategy.resident(placed.kind, world_size) else strategy.tier("parameters")


def saved_bytes(rule: UpdateRule, flat: Flat) -> int:
    """Return the bytes of a flat parameter's state in a checkpoint: an fp32 master, and moments in the form of the rule."""
    coded = flat.coded_numel if rule.coded else 0
    moment = coded + coded // GROUP_NUMEL * FP32_BYTES + (flat.numel - coded) * FP32_BYTES
    return flat.numel * FP32_BYTES + len(rule.moments) * moment


def _beside_weights(placed: Placed, strategy: Strategy, world_size: int, *, cpu: bool) -> bool:
    """Return whether the weights are where the state is updated."""
    tier = weights_tier(placed, strategy, world_size)
    return cpu or tier == NVME or (tier == DEVICE) == (strategy.state == DEVICE)


@lru_cache(maxsize=1024)
def _moments(rule: UpdateRule, flat: Flat, owners: int) -> tuple[StateStore, ...]:
    """Return the stores of all moments."""
    numel = flat.shard_numel(owners)
    if not (rule.coded and flat.coded_numel):
        return tuple(StateStore(name, numel) for name in rule.moments)
    found = CodedSizes.of(numel, flat.coded_numel, flat.numel, owners)
    return tuple(
        store
        for name in rule.moments
        for store in (
            StateStore(f"{name}.codes", found.codes, 1),
            StateStore(f"{name}.scales", found.scales, piece_numel=PIECE_NUMEL // GROUP_NUMEL),
            StateStore(name, found.plain),
        )
    )
