"""Profiles of nodes and shapes of models, read from hardware.yaml and models.yaml."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import ConfigDict, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from ftkit.errors import UserError
from ftkit.plan.memory import GIB
from ftkit.plan.speed import Rate, Rates, Size

DEVICE_RESERVE = (6, 100)
"""Share of a GPU's memory that is never granted, for fragments of torch's allocator. Assumed (docs/rates.md)."""

HOST_RESERVE_BYTES = 4 * GIB
"""Bytes of a node for its system and page cache. Assumed (docs/rates.md)."""


@dataclass(frozen=True)
class Hardware:
    """A kind of node."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=False)

    name: str  # name of the profile
    gpus: NonNegativeInt  # number of GPUs. 0: ranks compute on the host
    device_gib: Size  # memory of each GPU, in GiB
    host_gib: Rate | None  # memory of the node, in GiB. None: that of this machine
    nvme_gib: Size  # NVMe of the node, in GiB
    dtype: Literal["fp16", "bf16", "fp32"]  # compute dtype of its GPUs
    rates: Rates | None = None  # dram and nvme: of the whole node. None: plans have no seconds
    nodes: PositiveInt = 1  # number of nodes of this kind, joined by a network
    gpu: str = ""  # the driver's name of one of its GPUs
    ranks: NonNegativeInt = 0  # number of ranks with which the rates were measured. 0: they are valid for any number

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
        """
        if not self.rates:
            return None
        if self.ranks and (ranks > self.ranks or (not self.gpus and ranks != self.ranks)):
            raise UserError(
                f"{self.name}: its rates were measured with {self.ranks} ranks at once, not with {ranks}: measure again "
                f"(ftkit measure -o FILE.yaml --nproc {ranks})"
            )
        link = self.rates.link
        if ranks > self.gpus > 0:
            if not self.rates.network:
                return None
            link = min(link, self.rates.network)
        ranks = min(ranks, self.gpus) if self.gpus else ranks
        shared = {name: getattr(self.rates, name) / ranks for name in ("dram", "nvme_read", "nvme_write")}
        itemsize = 4 if self.dtype == "fp32" else 2
        return replace(self.rates, link=link, **shared, itemsize=itemsize, in_order=not self.gpus)


def profiles() -> dict[str, Hardware]:
    """Return the packaged profiles by name."""
    text = (resources.files("ftkit.plan") / "hardware.yaml").read_text(encoding="utf-8")
    found = yaml.safe_load(text)  # names that begin with a dot are values that several nodes share
    return {name: CHECKED.validate_python({"name": name, **values}) for name, values in found.items() if name[0] != "."}


def find_hardware(name: str, key: str = "--hardware") -> Hardware:
    """Return a packaged profile by its name, or that of a YAML file by its path. `key` names the option in messages."""
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
