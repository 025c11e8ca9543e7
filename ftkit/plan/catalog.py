"""Profiles of nodes and shapes of models, read from hardware.yaml and models.yaml."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from ftkit.errors import UserError
from ftkit.plan.memory import GIB
from ftkit.plan.speed import Rates

DEVICE_RESERVE = (6, 100)
"""Share of a GPU's memory that is never granted, for fragments of torch's allocator. Assumed (docs/rates.md)."""

HOST_RESERVE_BYTES = 4 * GIB
"""Bytes of a node for its system and page cache. Assumed (docs/rates.md)."""

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Size = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Rates(TypedDict):
    """Rates of a profile, per second. See hardware.yaml."""

    compute: Annotated[dict[PositiveInt, Rate], Field(min_length=1)]
    link: Rate
    network: NotRequired[Rate]
    pcie: Rate
    dram: Rate
    hbm: Rate
    nvme_read: NotRequired[Rate]
    nvme_write: NotRequired[Rate]
    collective_s: NotRequired[Size]


@dataclass(frozen=True)
class Hardware:
    """A kind of node.

    Args:
        name: Name of the profile.
        gpus: Number of GPUs. 0: ranks compute on the host.
        device_gib: Memory of each GPU, in GiB.
        host_gib: Memory of the node, in GiB. None: that of this machine.
        nvme_gib: NVMe of the node, in GiB.
        dtype: Compute dtype of its GPUs.
        rates: Rates of links and arithmetic. None: plans have no seconds.
        nodes: Number of nodes of this kind, joined by a network.
        gpu: The driver's name of one of its GPUs.
        ranks: Number of ranks with which the rates were measured. 0: they are valid for any number.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=False)

    name: str
    gpus: NonNegativeInt
    device_gib: Size
    host_gib: Rate | None
    nvme_gib: Size
    dtype: Literal["fp16", "bf16", "fp32"]
    rates: _Rates | None = None
    nodes: PositiveInt = 1
    gpu: str = ""
    ranks: NonNegativeInt = 0

    @property
    def device_bytes(self) -> int:
        """Memory of each GPU without the reserve."""
        part, whole = DEVICE_RESERVE
        total = int(self.device_gib * GIB)
        return total - total * part // whole

    @property
    def host_bytes(self) -> int | None:
        """Host memory of the node without the reserve."""
        return None if self.host_gib is None else int(self.host_gib * GIB) - HOST_RESERVE_BYTES

    def rates_of_a_rank(self, ranks: int) -> Rates | None:
        """Return the rates of each rank while all of them work. None if the profile does not have them.

        Ranks share host memory and drives. `pcie` and `link` are rates of one GPU. Collectives of several nodes pass
        through each node's network (a ring).

        Raises:
            UserError: The rates were measured with another number of ranks.
        """
        if not self.rates:
            return None
        if self.ranks and (ranks > self.ranks or (not self.gpus and ranks != self.ranks)):
            raise UserError(
                f"{self.name}: its rates were measured with {self.ranks} ranks at once, not with {ranks}: measure again "
                f"(ftkit measure -o FILE.yaml --nproc {ranks})"
            )
        rates: dict[str, Any] = dict(self.rates)
        network = rates.pop("network", None)
        if ranks > self.gpus > 0:
            if network is None:
                return None
            rates["link"] = min(rates["link"], network)
        ranks = min(ranks, self.gpus) if self.gpus else ranks
        shared = {name: rates.pop(name) / ranks for name in ("dram", "nvme_read", "nvme_write") if name in rates}
        itemsize = 4 if self.dtype == "fp32" else 2
        return Rates(**rates, **shared, itemsize=itemsize, in_order=not self.gpus)


def profiles() -> dict[str, Hardware]:
    """Return the packaged profiles by name."""
    text = (resources.files("ftkit.plan") / "hardware.yaml").read_text(encoding="utf-8")
    found = yaml.safe_load(text)  # names that begin with a dot are values that several nodes share
    return {name: CHECKED.validate_python({"name": name, **values}) for name, values in found.items() if name[0] != "."}


def find_hardware(name: str, key: str = "--hardware") -> Hardware:
    """Return a packaged profile, or the profile in a YAML file that `ftkit measure` wrote.

    Args:
        name: Name of a profile, or path of a YAML file.
        key: Option or recipe key that names it, for messages.
    """
    if name.endswith((".yaml", ".yml")):
        return _read(Path(name), key)
    known = profiles()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]!r}" if near else ""
    raise UserError(f"{key}: no profile {name!r}{hint}? Known: {', '.join(known)}, or a file NAME.yaml")


def profile_with(gpus: Sequence[str]) -> Hardware | None:
    """Return the packaged profile of a node with these GPUs, by their driver's names. None if there is none."""
    kinds = set(gpus)
    found = (each for each in profiles().values() if kinds == {each.gpu} and each.gpus == len(gpus) and each.nodes == 1)
    return next(found, None)


def _read(path: Path, key: str) -> Hardware:
    try:
        return CHECKED.validate_python({"name": path.stem, **yaml.safe_load(path.read_text(encoding="utf-8"))})
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{key}: {path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (OSError, yaml.YAMLError, TypeError) as error:
        raise UserError(f"{key}: {path} is not a profile: {' '.join(str(error).split())[:200]}") from None


CHECKED: TypeAdapter[Hardware] = TypeAdapter(Hardware)
"""Checks the keys and values of a profile."""


@dataclass(frozen=True)
class Architecture:
    """A model on the hub: its name, number of parameters, and the fields of its config.json."""

    name: str
    parameters: int
    config: dict[str, Any]


def architectures() -> dict[str, Architecture]:
    """Return the packaged models by hub name."""
    text = (resources.files("ftkit.plan") / "models.yaml").read_text(encoding="utf-8")
    return {name: Architecture(name, **facts) for name, facts in yaml.safe_load(text).items()}
