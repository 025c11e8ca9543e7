"""The optimizer state of a flat parameter, in fp32 or in other forms: 8-bit moments, a split master (spec/state_forms.py).

The updater reads and writes the stores of a form (`Extent`), and computes on codes. Everything else, as checkpoints and
exports, sees fp32 values: `CodedMoment` and `SplitMaster` are shards (S,) that are converted piece by piece. Decoding and
encoding again gives the same bits, so a resumed state equals the saved one. Roots of second moments below 2^-63 are an
exception: their squares are no normal fp32 numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.kernels.host_loops import HostLoops
from ftkit.engine.memory.tiers import Store
from ftkit.engine.optim import coding
from ftkit.spec.sizes import PIECE_NUMEL
from ftkit.spec.state_forms import GROUP_NUMEL, CodedSizes, plain_range, whole_pages
from ftkit.spec.update_rules import UpdateRule


@dataclass(frozen=True)
class Extent:
    """A store of the state, and the elements of the shard that it describes.

    Args:
        store: The store.
        start: Element of the shard at its first value.
        per: Elements of the shard per value.
    """

    store: Store
    start: int = 0
    per: int = 1

    def range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the values [low, high) of elements [start, stop), in whole pages. `start` is at a page of values."""
        low, high = max(start - self.start, 0) // self.per, -(-max(stop - self.start, 0) // self.per)
        high = min(whole_pages(high), self.store.numel)
        return (low, high) if low < high else (0, 0)

    def width(self, numel: int) -> int:
        """Return the most values of a piece of `numel` elements."""
        return min(whole_pages(-(-numel // self.per)), self.store.numel)

    def read(self, start: int, stop: int) -> Tensor:
        """Return the values of `range`: a view in memory, a copy from a file."""
        return self.store.read(*self.range(start, stop))

    def cut(self, view: Tensor, first: int, start: int, stop: int) -> Tensor:
        """Return the values of elements [start, stop) out of `view`, the values of a piece that begins at `first`."""
        skipped = max(first - self.start, 0) // self.per
        return view[(start - self.start) // self.per - skipped : -(-(stop - self.start) // self.per) - skipped]


def parts_of(at: dict[str, Tensor], numel: int) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of some elements by role, `numel` elements at a time; it is a multiple of 128."""
    for start in range(0, at["gradient"].numel(), numel):
        pers = {role: GROUP_NUMEL if role.endswith(".scales") else 1 for role in at}
        yield {role: tensor[start // pers[role] : (start + numel) // pers[role]] for role, tensor in at.items()}


def coder_for(tensor: Tensor, host: HostLoops) -> HostLoops:
    """Return the conversions on the device of a tensor: compiled loops on the host, else the reference in PyTorch."""
    return host if tensor.device.type == "cpu" else coding  # type: ignore[return-value]  # a module with these functions


class _Converted:
    """The pieces of a shard (S,) that is converted to fp32 when it is read: at most `PIECE_NUMEL` elements at a time."""

    dtype = torch.float32

    def __init__(self, numel: int) -> None:
        self.numel = numel

    def pieces(self) -> Iterator[tuple[int, int]]:
        """See `MemoryStore.pieces`."""
        for start in range(0, self.numel, PIECE_NUMEL):
            yield start, min(start + PIECE_NUMEL, self.numel)


class CodedMoment(_Converted):
    """A moment (S,) with 8-bit codes for the coded matrices, and fp32 values for other tensors.

    Args:
        codes: Codes (S,) uint8.
        scales: Scales (S/128,) fp32, in whole pages.
        plain: fp32 values of the other tensors. None if there are none on any rank.
        plain_start: Element of the shard at the first plain value; S if this rank has none.
        coded_numel: Elements of the shard that are coded: the first ones.
        root: The codes have the square roots of the values, without a sign.
        host: Loops for codes on the host.
    """

    def __init__(
        self,
        codes: Store,
        scales: Store,
        plain: Store | None,
        *,
        plain_start: int,
        coded_numel: int,
        root: bool,
        host: HostLoops,
    ) -> None:
        super().__init__(codes.numel)
        self.codes, self.scales = Extent(codes), Extent(scales, per=GROUP_NUMEL)
        self.plain = None if plain is None else Extent(plain, plain_start)
        self.coded_numel, self.root, self.host = coded_numel, root, host

    def extents(self, name: str) -> dict[str, Extent]:
        """Return the stores by role, for the moment `name`."""
        coded = {f"{name}.codes": self.codes, f"{name}.scales": self.scales}
        return coded | ({} if self.plain is None else {name: self.plain})

    def blank(self, start: int, stop: int) -> Tensor:
        """See `MemoryStore.blank`."""
        near = self.codes.store.tensor
        return torch.zeros(stop - start, device=None if near is None else near.device)

    def read(self, start: int, stop: int) -> Tensor:
        """Return a piece: a copy in fp32."""
        values = self.blank(start, stop)
        coded = max(min(self.coded_numel, stop) - start, 0)
        if coded:
            codes, scales = (each.cut(each.read(start, stop), start, start, start + coded) for each in self._coded)
            decoded = coder_for(codes, self.host).decode(codes, scales, signed=not self.root)
            values[:coded] = decoded.square_() if self.root else decoded
        if (plain := self._plain(start, stop)) is not None:
            found = plain.cut(plain.read(start, stop), start, start + coded, stop)
            values[coded : coded + found.numel()] = found
        return values

    def write(self, start: int, piece: Tensor) -> None:
        """Store fp32 values (n,) as elements [start, start + n), a piece of `pieces`."""
        stop = start + piece.numel()
        coded = max(min(self.coded_numel, stop) - start, 0)
        if coded:
            values = piece[:coded].double().sqrt().float() if self.root else piece[:coded]  # rounded once on any device
            pair = coder_for(values, self.host).encode(values, signed=not self.root)
            for extent, found in zip(self._coded, pair):
                _write(extent, start, stop, start, found)
        if (plain := self._plain(start, stop)) is not None:
            _write(plain, start, stop, start + coded, piece[coded:])

    def _plain(self, start: int, stop: int) -> Extent | None:
        """Return the plain store if it has any of the elements [start, stop)."""
        low, high = (0, 0) if self.plain is None else self.plain.range(start, stop)
        return self.plain if low < high else None

    @property
    def _coded(self) -> tuple[Extent, Extent]:
        return self.codes, self.scales


class SplitMaster(_Converted):
    """Master weights (S,) as 16-bit weights, the model's own, and int16 residuals.

    Args:
        weights: Weights (S,) bf16 or fp16.
        residual: Residuals (S,) int16.
        host: Loops for weights on the host.
    """

    def __init__(self, weights: Store, residual: Store, host: HostLoops) -> None:
        super().__init__(weights.numel)
        self.weights, self.residual, self.host = weights, residual, host

    def blank(self, start: int, stop: int) -> Tensor:
        """See `MemoryStore.blank`."""
        near = self.weights.tensor
        return torch.zeros(stop - start, device=None if near is None else near.device)

    def read(self, start: int, stop: int) -> Tensor:
        """Return a piece: a copy in fp32."""
        weight = self.weights.read(start, stop)
        return coder_for(weight, self.host).join(weight, self.residual.read(start, stop))

    def write(self, start: int, piece: Tensor) -> None:
        """Store fp32 values (n,) as elements [start, start + n), a piece of `pieces`. This also sets the weights."""
        stop = start + piece.numel()
        weight, residual = self.weights.blank(start, stop), self.residual.blank(start, stop)
        coder_for(piece, self.host).split(piece, weight, residual)
        self.weights.write(start, weight)
        self.residual.write(start, residual)


@dataclass
class FlatState:
    """The optimizer state of one flat parameter on this rank.

    Args:
        master: Master weights (S,) fp32; the weights' own store where these are fp32 and on the same tier.
        moments: Moments (S,) by name, fp32 or in 8 bits.
        steps: Number of updates of each tensor.
    """

    master: Store | SplitMaster
    moments: dict[str, Store | CodedMoment]
    steps: list[int]

    @classmethod
    def of(cls, flat: FlatParameter, rule: UpdateRule, stores: Mapping[str, Store], host: HostLoops) -> FlatState:
        """Return the state that is stored in `stores`, made with `state_sizes`."""
        master: Store | SplitMaster = stores.get("master", flat.weights)
        if "residual" in stores:
            master = SplitMaster(flat.weights, stores["residual"], host)
        numel = flat.layout.shard_numel
        start, _ = plain_range(numel, flat.coded_numel, flat.layout.numel, flat.rank)
        coded = min(max(flat.coded_numel - flat.rank * numel, 0), numel)
        moments: dict[str, Store | CodedMoment] = {}
        for name in rule.moments:
            if f"{name}.codes" not in stores:
                moments[name] = stores[name]
                continue
            three = stores[f"{name}.codes"], stores[f"{name}.scales"], stores.get(name)
            root = name in rule.roots
            moments[name] = CodedMoment(*three, plain_start=start, coded_numel=coded, root=root, host=host)
        return cls(master, moments, [0] * len(flat.parameters))

    @property
    def extents(self) -> dict[str, Extent]:
        """All stores of the state by role."""
        master = self.master
        found = {"residual": Extent(master.residual)} if isinstance(master, SplitMaster) else {"master": Extent(master)}
        for name, moment in self.moments.items():
            found |= moment.extents(name) if isinstance(moment, CodedMoment) else {name: Extent(moment)}
        return found


def state_sizes(flat: FlatParameter, rule: UpdateRule, master: str | None) -> dict[str, tuple[int, torch.dtype]]:
    """Return (elements, dtype) of the stores of a state by role, equal on all ranks.

    Args:
        flat: The flat parameter.
        rule: The update rule.
        master: Form of the master weight, "fp32" or "split". None if the weight is the master.
    """
    numel = flat.layout.shard_numel
    masters = {"fp32": {"master": (numel, torch.float32)}, "split": {"residual": (numel, torch.int16)}, None: {}}
    sizes = dict(masters[master])
    for moment in rule.moments:
        if not rule.coded or not flat.coded_numel:
            sizes[moment] = numel, torch.float32
            continue
        coded = CodedSizes.of(numel, flat.coded_numel, flat.layout.numel, flat.owners)
        sizes |= {f"{moment}.codes": (coded.codes, torch.uint8), f"{moment}.scales": (coded.scales, torch.float32)}
        if coded.plain:
            sizes[moment] = coded.plain, torch.float32
    return sizes


def _write(extent: Extent, start: int, stop: int, first: int, values: Tensor) -> None:
    """Write the values of elements from `first` on, in the piece [start, stop)."""
    low, high = extent.range(start, stop)
    piece = extent.store.read(low, high)
    into = extent.cut(piece, start, first, first + values.numel() * extent.per)
    into.copy_(values[: into.numel()])
    extent.store.write(low, piece)
