"""Profiles of nodes: how many GPUs, and how many GiB of each tier. The figures are in hardware.yaml, each with its source.

It refuses names that are not there, and profiles with other keys than these. What it costs: nothing.
"""

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
"""Share of a GPU's memory that is never granted: fragments of torch's allocator. Measured on no V100 yet."""

HOST_RESERVE_BYTES = 4 * GIB
"""Of a node, that its system and page cache keep."""


Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Size = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Rates(TypedDict):
    """What a profile says of speed, per second; see hardware.yaml."""

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
        name: name of the profile.
        gpus: number of GPUs; 0 means that ranks compute on the host.
        device_gib: memory of each GPU, GiB.
        host_gib: memory of the node, GiB; None takes this machine's.
        nvme_gib: NVMe of the node, GiB.
        dtype: dtype that its GPUs compute in.
        rates: rates of links and arithmetic, for a plan in seconds; without them there is no such plan.
        nodes: number of nodes of this kind, joined by a network.
        gpu: what the driver calls one of its GPUs.
        ranks: number of ranks that the rates were measured with; 0 means that they hold for any number.
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
        """What is granted of each GPU, the reserve taken off."""
        part, whole = DEVICE_RESERVE
        total = int(self.device_gib * GIB)
        return total - total * part // whole

    def rates_of_a_rank(self, ranks: int) -> Rates | None:
        """Return what each rank has for itself while all of them work; None where the profile does not say.

        Host memory and drives are shared by all; what the profile calls `pcie` and `link` is a GPU's own. Ranks of several
        nodes pass everything on through each node's network, one after the other (a ring).

        Raises:
            UserError: for rates that were measured with other ranks.
        """
        if not self.rates:
            return None
        if self.ranks and (ranks > self.ranks or (not self.gpus and ranks != self.ranks)):
            raise UserError(
                f"{self.name}: its rates were measured with {self.ranks} ranks at once, not with {ranks}: measure again "
                f"(ftkit measure -o FILE.yaml --nproc {ranks})"
            )
        told: dict[str, Any] = dict(self.rates)
        network = told.pop("network", None)
        if ranks > self.gpus > 0:
            if network is None:
                return None
            told["link"] = min(told["link"], network)
        ranks = min(ranks, self.gpus) if self.gpus else ranks
        shared = {name: told.pop(name) / ranks for name in ("dram", "nvme_read", "nvme_write") if name in told}
        itemsize = 4 if self.dtype == "fp32" else 2
        return Rates(**told, **shared, itemsize=itemsize, in_order=not self.gpus)

    @property
    def host_bytes(self) -> int | None:
        """What is granted of the host, the reserve taken off."""
        return None if self.host_gib is None else int(self.host_gib * GIB) - HOST_RESERVE_BYTES


def profiles() -> dict[str, Hardware]:
    """Return the packaged profiles by name."""
    text = (resources.files("ftkit.plan") / "hardware.yaml").read_text(encoding="utf-8")
    told = yaml.safe_load(text)  # names that begin with a dot are what several nodes have in common
    return {name: CHECKED.validate_python({"name": name, **values}) for name, values in told.items() if name[0] != "."}


def find_hardware(name: str, key: str = "--hardware") -> Hardware:
    """Return a profile: a packaged one by its name, or one in a YAML file, such as `ftkit measure` writes.

    Args:
        name: name of a profile, or path of a YAML file.
        key: option or key by which the user named it, for messages.

    Raises:
        UserError: if there is none of that name, with the nearest one and all of them; or naming what is wrong in the file.
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
    """Return the packaged profile of a node with these GPUs, as their driver calls them; None if there is none."""
    kinds = set(gpus)
    found = (each for each in profiles().values() if kinds == {each.gpu} and each.gpus == len(gpus) and each.nodes == 1)
    return next(found, None)


def _read(path: Path, key: str) -> Hardware:
    try:
        told = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(told, dict):
            raise UserError(f"{key}: {path} is not a mapping of a profile's keys")
        return CHECKED.validate_python({"name": path.stem, **told})
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key}: {path} cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{key}: {path} is not YAML: {' '.join(str(error).split())[:200]}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{key}: {path}: {where}: {first['msg']}") from None
    except ValueError as error:  # PyYAML, of a date that is none
        raise UserError(f"{key}: {path} is not YAML: {' '.join(str(error).split())[:200]}") from None


CHECKED: TypeAdapter[Hardware] = TypeAdapter(Hardware)
"""Refuses keys and values that a profile may not have."""


@dataclass(frozen=True)
class Architecture:
    """A model's shape.

    Args:
        name: name on the hub.
        parameters: number of its parameters.
        config: fields of its config.json, `model_type` among them.
    """

    name: str
    parameters: int
    config: dict[str, Any]


def architectures() -> dict[str, Architecture]:
    """Return those that are known, by hub name."""
    text = (resources.files("ftkit.plan") / "models.yaml").read_text(encoding="utf-8")
    return {name: Architecture(name, **facts) for name, facts in yaml.safe_load(text).items()}
