"""Profiles of nodes: those that are packaged, files of users, and what a rank has of a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ftkit.cli import app as cli
from ftkit.config.recipe import Recipe, parse
from ftkit.errors import UserError
from ftkit.plan.catalog import find_hardware, profile_with, profiles
from ftkit.plan.schedule import speed
from ftkit.plan.shape import Flat, Shape
from ftkit.spec.strategy import Strategy
from ftkit.train.planning import _rates, profile_here
from tests.plan.made import script

V100 = "Tesla V100-SXM2-16GB"
RATES = {"compute": {256: 1e11}, "link": 1e9, "collective_s": 1e-4, "dram": 4e10, "hbm": 2e10, "pcie": 2e10}
TOLD: dict[str, Any] = {
    "gpus": 0, "gpu": "", "device_gib": 0, "host_gib": 23.5, "nvme_gib": 0, "dtype": "fp32",
    "rates": RATES,
}  # fmt: skip


def written(folder: Path, **changes: Any) -> str:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({**TOLD, **changes}))
    return str(path)


def test_every_packaged_profile_is_whole() -> None:
    for name, each in profiles().items():
        assert each.name == name
        rates = each.rates_of_a_rank(max(each.gpus * each.nodes, 1))
        assert (rates is None) == (not each.rates)
        if rates is not None and each.nvme_gib:
            assert rates.nvme_read > 0 < rates.nvme_write


def test_what_a_box_has_is_shared_by_its_ranks() -> None:
    eight = find_hardware("8xv100-32gb")
    one, all_ = eight.rates_of_a_rank(1), eight.rates_of_a_rank(8)
    assert one is not None
    assert all_ is not None
    assert (one.dram, one.nvme_read) == (8 * all_.dram, 8 * all_.nvme_read)
    assert (one.link, one.pcie) == (all_.link, all_.pcie)
    cluster = find_hardware("16xv100")
    assert cluster.rates_of_a_rank(16).dram == cluster.rates_of_a_rank(8).dram  # type: ignore[union-attr]  # it has rates
    assert find_hardware("8xv100-16gb").rates_of_a_rank(16) is None, "no network is known"


def test_a_file_of_the_user(tmp_path: Path) -> None:
    mine = find_hardware(written(tmp_path))
    assert (mine.name, mine.dtype) == ("mine", "fp32")
    rates = mine.rates_of_a_rank(2)
    assert rates is not None
    assert (rates.dram, rates.in_order, rates.itemsize) == (2e10, True, 4)


def test_files_that_are_none(tmp_path: Path) -> None:
    files = {"no": None, "list": "- 1", "broken": "{a: [", "code": "!!python/object/apply:os.getcwd []"}
    for name, text in files.items():
        path = tmp_path / f"{name}.yaml"
        if text is not None:
            path.write_text(text)
        with pytest.raises(UserError, match=f"hardware: .*{name}.yaml"):
            find_hardware(str(path), "hardware")
    with pytest.raises(UserError, match="did you mean '8xv100-16gb'"):
        find_hardware("8xv100-16g")


def test_rates_are_those_of_the_ranks() -> None:
    assert _rates(find_hardware("8xv100-16gb"), 2, cpu=False) is not None
    assert _rates(find_hardware("8xv100-16gb"), 2, cpu=True) is None, "rates of GPUs do not hold for CPU ranks"
    assert _rates(find_hardware("8xv100-16gb"), 16, cpu=False) is None, "16 ranks need a network"
    assert _rates(None, 2, cpu=False) is None


def recipe(**changes: Any) -> Recipe:
    told = {"model": {"name": "a/b"}, "data": {"path": "bundled/python-docs.jsonl"}, "output": {"dir": "runs/x"}, **changes}
    return parse(yaml.safe_dump(told), "recipe.yaml")


def test_a_run_finds_the_profile_of_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert profile_with([V100] * 8) == find_hardware("8xv100-16gb")
    assert profile_with([V100] * 4) is None
    assert profile_with([V100] * 7 + ["NVIDIA H200"]) is None
    assert profile_with([]) is None
    assert profile_here(recipe()) is None
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: V100)
    assert profile_here(recipe()) == find_hardware("8xv100-16gb")
    assert profile_here(recipe(hardware="dgx-2")) == find_hardware("dgx-2")
    assert profile_here(recipe(hardware=written(tmp_path))).host_gib == 23.5  # type: ignore[union-attr]  # it is there
    with pytest.raises(UserError, match="hardware: no profile"):
        profile_here(recipe(hardware="nothing-like-it"))


def test_cpu_ranks_do_one_thing_after_the_other(tmp_path: Path) -> None:
    line = (Flat(1 << 20, 4, trained=True),)
    shape = Shape((line,) * 4, line, line, 256, 97, 1000, 1000, 256, 4, 2)
    rates = find_hardware(written(tmp_path)).rates_of_a_rank(2)
    assert rates is not None
    assert rates.missing(shape, Strategy.of()) is None
    assert rates.missing(shape, Strategy.of(state="nvme"))
    assert {event.stream for event in script(shape, Strategy.of(), in_order=True).events} == {"compute"}
    made = speed(shape, Strategy.of(), rates)
    first, both = (
        sum(
            event.latency_s + max((amount / rates.all(256)[name] for name, amount in event.work.items()), default=0.0)
            for event in script(shape, Strategy.of(), steps, in_order=True).events
        )
        for steps in (1, 2)
    )
    assert made.seconds == pytest.approx(both - first, rel=0.02), "but for latencies"


@pytest.mark.slow
def test_this_box_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    with pytest.raises(SystemExit) as caught:
        cli.main(["measure", "-o", str(path), "--nproc", "2"])
    assert not caught.value.code
    here = find_hardware(str(path))
    rates = here.rates_of_a_rank(2)
    assert rates is not None
    assert (here.gpus, here.dtype) == (0, "fp32")
    assert all(1e9 < each < 1e13 for each in rates.compute.values())
    assert 1e7 < rates.link < 1e12
    assert 1e9 < rates.hbm < 1e12
    with pytest.raises(SystemExit):
        cli.main(["measure", "-o", str(tmp_path / "here.txt")])
