"""`ftkit doctor`: verdicts on recorded nodes, and the truth about this one."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pynvml
import pytest
import torch
from typer.testing import CliRunner

from ftkit.cli.app import app
from ftkit.cli.doctor import Finding, judge, required
from ftkit.cli.probe import Gpu, Probe, _driver, _triton_error, probe

PROBES = Path(__file__).parent / "probes"


def read(facts: dict[str, Any]) -> Probe:
    """Return a probe from its JSON."""
    gpus = tuple(Gpu(**each) for each in facts["gpus"])
    return Probe(**{**facts, "gpus": gpus, "cgroup": facts["cgroup"] and tuple(facts["cgroup"])})


def recorded(name: str) -> Probe:
    return read(json.loads((PROBES / f"{name}.json").read_text()))


def findings(facts: Probe) -> dict[str, Finding]:
    return {each.name: each for each in judge(facts)}


def verdicts(facts: Probe, verdict: str) -> set[str]:
    return {each.name for each in judge(facts) if each.verdict == verdict}


def test_a_good_v100_node() -> None:
    found = findings(recorded("v100_good"))
    assert {each.verdict for each in found.values()} == {"ok"}
    assert found["GPUs"].found == "8 x Tesla V100-SXM2-16GB, sm_70"
    assert found["torch"].found == "2.13.0+cu126, built for CUDA 12.6"
    assert found["links"].found == "NVLink between 16 of 28 pairs of GPUs"
    assert "writes 2.1 GB/s, reads 3.9 GB/s" in found["NVMe"].found


def test_a_v100_node_with_the_default_wheel() -> None:
    found = findings(recorded("v100_wrong_wheel"))
    assert {name for name, each in found.items() if each.verdict != "ok"} == {"torch"}
    torch_ = found["torch"]
    assert torch_.verdict == "fail"
    assert "computes on 0 of 8 GPUs: CUDA error: no kernel image" in torch_.found
    assert torch_.fix == 'pip install "torch==2.13.*" --index-url https://download.pytorch.org/whl/cu126'


def test_an_h200() -> None:
    found = findings(recorded("h200"))
    assert {each.verdict for each in found.values()} == {"ok"}
    assert "links" not in found, "there is one GPU"


def test_a_container() -> None:
    found = findings(recorded("container"))
    assert verdicts(recorded("container"), "warn") == {"links", "memory", "shared memory"}
    assert not verdicts(recorded("container"), "fail")
    assert found["memory"].found.startswith("32.0 of 128 GiB: limited by /sys/fs/cgroup")
    assert "--shm-size" in found["shared memory"].fix


@pytest.mark.parametrize(
    ("change", "name", "verdict", "said"),
    [
        ({"torch_cuda": None}, "torch", "fail", "built for the CPU: it cannot use GPUs"),
        ({"driver": "470.82"}, "driver", "fail", "too old for CUDA 12.6, which needs R525"),
        ({"torch_gpus": 4}, "torch", "warn", "computes on 4 of 8 GPUs"),
        ({"torch_gpus": 0, "torch_error": "no device"}, "torch", "fail", "computes on 0 of 8 GPUs: no device"),
        ({"gpus": (), "torch_gpus": 0, "driver_error": "Driver/library version mismatch"}, "GPUs", "fail", "mismatch"),
        ({"triton_error": "ptxas fatal"}, "Triton", "fail", "cannot compile for sm_70 (ptxas fatal); Triton 3.4 to 3.9 can"),
        ({"compiler": None}, "Triton", "fail", "needs a C compiler"),
        ({"linked_pairs": 0}, "links", "warn", "no NVLink"),
    ],
)
def test_one_thing_wrong(change: dict, name: str, verdict: str, said: str) -> None:
    facts = replace(recorded("v100_good"), **change)
    found = [each for each in judge(facts) if each.name == name and each.verdict == verdict]
    assert found, findings(facts)
    assert said in found[0].found


def test_versions_are_compared_with_what_the_package_asks_for() -> None:
    assert {"torch", "transformers", "triton"} <= {each.name for each in required()}
    good = recorded("v100_good")
    facts = replace(good, versions={**good.versions, "torch": "2.16.0", "peft": None})
    found = findings(facts)
    assert found["peft"].fix.startswith('pip install "peft')
    assert any(each.name == "torch" and "2.16.0; ftkit is tested with" in each.found for each in judge(facts))
    old = replace(good, versions={**good.versions, "torch": "2.9.1+cu126"})
    assert any("ftkit is tested with <2.15,>=2.10" in each.found for each in judge(old))
    assert "versions" not in found


def test_this_machine(tmp_path: Path) -> None:
    facts = probe(tmp_path)
    assert facts.memory_bytes == pytest.approx(psutil.virtual_memory().total, rel=1e-3)
    assert facts.torch_cuda == torch.version.cuda
    assert facts.versions["torch"] == torch.__version__.split("+")[0] or facts.versions["torch"] == torch.__version__
    assert 0 < facts.nvme["free_bytes"] <= shutil.disk_usage(tmp_path).total
    assert facts.nvme["write_bytes_per_s"] > 0
    assert read(json.loads(json.dumps(asdict(facts)))) == facts
    assert not list(tmp_path.iterdir()), "what was measured is removed"
    found = findings(facts)
    if not torch.cuda.is_available():
        assert found["GPUs"].found.startswith("none: ftkit computes on the CPU")
    assert found["Triton"].verdict == "ok"


def test_the_command() -> None:
    ran = CliRunner().invoke(app, ["doctor", "--json"])
    said = json.loads(ran.stdout)
    failed = [each for each in said["findings"] if each["verdict"] == "fail"]
    assert ran.exit_code == bool(failed)
    assert read(said["probe"]).versions["torch"]
    shown = CliRunner().invoke(app, ["doctor"])
    assert "GPUs" in shown.stdout


class Driver:
    """A driver of two linked GPUs."""

    count = 2

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetName(self, handle: int) -> str:
        return ("Tesla V100-SXM2-16GB", "NVIDIA GB10")[handle]

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return ((7, 0), (12, 1))[handle]

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:
        linked = index == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        return pynvml.NVML_P2P_STATUS_OK if linked else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"


def test_what_the_driver_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftkit.cli.probe.pynvml", Driver())
    gpus = (Gpu("Tesla V100-SXM2-16GB", 70), Gpu("NVIDIA GB10", 121))
    assert _driver() == {"gpus": gpus, "driver": "580.95.05", "linked_pairs": 1}
    monkeypatch.setattr(Driver, "count", 0)
    assert _driver() == {"driver_error": "580.95.05 finds no GPU"}
    broken = pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    monkeypatch.setattr(Driver, "nvmlInit", mock.Mock(side_effect=broken))
    assert "mismatch" in _driver()["driver_error"].lower()
    absent = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    monkeypatch.setattr(Driver, "nvmlInit", mock.Mock(side_effect=absent))
    assert _driver() == {}


def test_a_kernel_is_compiled_for_the_named_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert _triton_error() is None
    monkeypatch.setattr("ftkit.cli.probe.VOLTA", 35)
    assert "sm_35" in str(_triton_error())


def test_a_folder_that_is_no_drive(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with mock.patch("ftkit.cli.probe._triton_error", return_value=None):
        found = findings(probe(file))["NVMe"]
    assert found.verdict == "fail"
    assert str(file) in found.found
