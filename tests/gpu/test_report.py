"""`make gpu` on a machine without a GPU: its report, how a part is run, and what the measurements make of their records."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.plan_against_runs import GPU_CASES
from ftkit.engine.comm.communicator import Communicator
from tests.engine import test_arena
from tests.gpu import __main__ as gpu
from tests.gpu import claims, measured, test_cuda, test_kernels, test_notebook
from tests.gpu.one_card import HostCommunicator

HOPPER = {"cards": [{"name": "H200", "capability": [9, 0], "bytes": 1 << 37}]}


ROOT = Path(__file__).parents[2]


def verdict_on(text: str, results: list[claims.Result], out: Path, machine: dict[str, Any] = HOPPER) -> str:
    record = gpu.write(out, machine, results)
    assert json.loads((out / "gpu.json").read_text()) == json.loads(json.dumps(record))
    (found,) = [each for each in record["claims"] if each["claim"] == text]
    assert f"| {text} | {found['where']} | {found['verdict']} |" in (out / "gpu.md").read_text()
    return found["verdict"]


@pytest.mark.parametrize("claim", claims.CLAIMS, ids=lambda claim: claim.text)
def test_a_claim_is_in_the_documentation(claim: claims.Claim) -> None:
    assert claim.quotation in " ".join((ROOT / claim.where).read_text().split())


def test_without_a_gpu_nothing_is_tried(tmp_path: Path) -> None:
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.gpu", "--out", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=ROOT, check=True)
    assert run.stdout.startswith("not tried: torch sees no CUDA device\n")
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert {each["verdict"] for each in record["claims"]} == {each["status"] for each in record["parts"]} == {"not tried"}


def test_an_unknown_part_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "peeks"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "no such part: peeks; known: single, stages-1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        (["passed", "passed", "passed"], "confirmed"),
        (["passed", "failed", "passed"], "refuted"),
        (["passed", "skipped", "passed"], "not tried"),
        (["passed", "error", "passed"], "not tried"),
        (["passed", "passed"], "not tried"),
    ],
)
def test_tests_decide_a_claim(outcomes: list[str], verdict: str, tmp_path: Path) -> None:
    results = [claims.Result(f"stages-{n}", "passed", tests={f"test[{n}]": how}) for n, how in enumerate(outcomes, 1)]
    assert verdict_on("stages 0-3 follow plain PyTorch on 1, 2 and 3 ranks", results, tmp_path) == verdict


@pytest.mark.parametrize(
    ("allocated", "status", "verdict"),
    [
        (90, "passed", "confirmed"),
        (101, "passed", "refuted"),
        (90, "failed", "not tried"),  # it did not measure all cases
        (101, "failed", "refuted"),
    ],
)
def test_figures_decide_a_claim(allocated: int, status: str, verdict: str, tmp_path: Path) -> None:
    case = {"allocated": allocated, "planned": 100, "reserved": 110, "used": 120, "planned_with_runtime": 140}
    results = [claims.Result("peaks", status, figures={"a run": case})]
    assert verdict_on("PyTorch allocates no more than planned", results, tmp_path) == verdict
    other = "with everything on NVMe, PyTorch allocates no more than planned"
    assert verdict_on(other, results, tmp_path) == "not tried"


def test_kernels_that_failed_are_shown(tmp_path: Path) -> None:
    cases = {"gelu": {"moved_bytes": 1, "seconds": {"ftkit": 1e-4, "eager": "OutOfMemoryError: no memory"}}}
    gpu.write(tmp_path, HOPPER, [claims.Result("kernel-rates", "passed", figures={"cases": cases})])
    assert "| gelu | 100 | OutOfMemoryError: no memory |  |  |" in (tmp_path / "gpu.md").read_text()


def test_earlier_parts_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = claims.Result("overlap", "passed", figures={"copies_s": 1.0, "kernels_s": 2.0, "both_s": 0.5})
    gpu.write(tmp_path, HOPPER, [result])
    assert gpu.earlier(tmp_path, HOPPER) == [result]
    assert gpu.earlier(tmp_path, {**HOPPER, "torch": "2.99"}) == []
    monkeypatch.setattr(gpu, "digest", lambda: "another")
    assert gpu.earlier(tmp_path, HOPPER) == []


def test_claims_about_other_machines_are_not_tried(tmp_path: Path) -> None:
    names = ("stages-1", "stages-2", "host-1", "host-2", "kernels")
    results = [claims.Result(name, "passed", tests={"test": "passed"}) for name in names]
    machines = (HOPPER, {"cards": [{"name": "V100", "capability": [7, 0], "bytes": 1 << 34}] * 2})
    records = [gpu.write(tmp_path, machine, results) for machine in machines]
    found = [{claim["claim"]: claim["verdict"] for claim in record["claims"]} for record in records]
    for claim in ("a V100 runs the engine", "fused kernels are correct on a V100", "the engine's collectives run over NCCL"):
        assert [each[claim] for each in found] == ["not tried", "confirmed"]
    assert found[1]["several nodes train one model"] == "not tried"


def test_a_part_is_run_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = "import json, sys; json.dump({'both_s': 1.0}, open('{out}/found.json', 'w')); print('end'); sys.exit({code})"

    def part(program: str) -> claims.Result:
        return gpu.run(gpu.Part("overlap", ("-c", program), needs=("torch",)), tmp_path, tmp_path)

    result = part(writes.replace("{code}", "0"))
    assert (result.status, result.figures, result.reason) == ("passed", {"both_s": 1.0}, "")
    result = part(writes.replace("{code}", "3"))
    assert (result.status, result.figures, result.reason) == ("failed", {"both_s": 1.0}, "exit code 3\nend\n")
    monkeypatch.setattr(gpu, "LIMIT_S", 0.1)
    result = part("import time; time.sleep(600)")
    assert (result.status, result.figures) == ("failed", {})
    assert result.reason.startswith("killed after 0 s")
    result = gpu.run(gpu.Part("overlap", (), needs=("torch", "no-such-package")), tmp_path, tmp_path)
    assert (result.status, result.reason) == ("not tried", "missing: no-such-package")
    monkeypatch.setattr(gpu.metadata, "version", lambda name: "2.9.1+cu126")
    assert gpu.lacking(["torch"]) == ["torch >= 2.10 (2.9.1+cu126 is here)"]


def test_the_outcomes_of_tests(tmp_path: Path) -> None:
    reports = (
        "",
        "<failure/>",
        "<skipped/>",
        "<error/>",
        '<failure message="Failed: Timeout (&gt;200s) from pytest-timeout."/>',
    )
    cases = [f'<testcase name="{number}">{report}</testcase>' for number, report in enumerate(reports)]
    cases.append('<testcase name="1"><error message="failed on teardown"/></testcase>')
    (tmp_path / "tests.xml").write_text(f"<suite>{''.join(cases)}</suite>")
    outcomes = gpu.outcomes(tmp_path / "tests.xml")
    assert list(outcomes.values()) == ["passed", "failed", "skipped", "error", "error"]


def test_a_test_that_did_not_run_confirms_nothing(tmp_path: Path) -> None:
    for second, verdict in (
        ("passed", "confirmed"),
        ("skipped", "confirmed"),
        ("error", "not tried"),
        ("failed", "refuted"),
    ):
        results = [claims.Result("kernels", "failed", tests={"a": "passed", "b": second})]
        assert verdict_on("fused kernels are correct", results, tmp_path) == verdict


def test_a_report_is_not_replaced_by_a_machine_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.write(tmp_path, HOPPER, [])
    before = (tmp_path / "gpu.json").read_text()
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path)])
    monkeypatch.setattr(gpu, "describe", lambda: ({"cards": []}, "torch sees no CUDA device"))
    monkeypatch.setattr(gpu.signal, "signal", lambda *arguments: None)
    assert gpu.main() == 0
    assert (tmp_path / "gpu.json").read_text() == before


def test_parts_name_tests_that_exist() -> None:
    assert (gpu.GROUPS, gpu.WORLDS) == (test_cuda.GROUPS, test_cuda.WORLDS)
    names = {name for module in (test_cuda, test_arena, test_kernels, test_notebook) for name in vars(module)}
    chosen = [each.partition("::")[2].partition("[")[0] for part in gpu.PARTS for each in part.arguments if "::" in each]
    assert names.issuperset(chosen)
    for part in (claims.PINNED, claims.OFFLOADED, claims.TIMED):
        assert any(part in name for name in names)


def test_copies_beside_kernels() -> None:
    def event(cat: str, name: str, ts: int, dur: int) -> dict[str, Any]:
        return {"cat": cat, "name": name, "ts": ts * 1e6, "dur": dur * 1e6}

    events = [
        event("kernel", "gemm", 0, 10),
        event("kernel", "add", 5, 3),  # on another stream, within the first
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 8, 6),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 30, 1),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 9),
        {"name": "thread_name"},
    ]
    assert measured.beside(events) == {"copies_s": 7.0, "kernels_s": 10.0, "both_s": 2.0}
    assert claims.overlapped({"copies_s": 7.0, "kernels_s": 10.0, "both_s": 2.0}) == pytest.approx(2 / 7)


def test_the_measured_runs_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [replace(case, llama="12m", sequence_tokens=32) for case in GPU_CASES]
    small[:4] = [replace(case, dtype="fp32") for case in small[:4]]  # fp16 is slow on a CPU
    monkeypatch.setattr(measured, "GPU_CASES", small)
    monkeypatch.setattr(measured, "CARD", torch.device("cpu"))
    measured.main("peaks", str(tmp_path / "peaks.json"), "0", str(measured.ON_HOST), "4")
    found = json.loads((tmp_path / "peaks.json").read_text())
    assert [len(case["losses"]) for case in found.values()] == [2, 2, 2]
    monkeypatch.setattr(measured.ftkit.ShardedAdamW, "step", lambda optimizer: None)
    with pytest.raises(SystemExit, match="does not train"):
        measured.main("peaks", str(tmp_path / "peaks.json"), "0")


def exchanged() -> None:
    """Compare the collectives of ranks that share a card with those of the engine."""
    theirs = Communicator(torch.device("cpu"))
    ours = HostCommunicator(torch.device("cpu"))
    rank, world = theirs.rank, theirs.world_size
    for dtype in (torch.float32, torch.float16):
        own = (torch.arange(4 * world) + 10 * rank).to(dtype)
        results = []
        for comm in (theirs, ours):
            full, shard, mean, first = torch.zeros_like(own), torch.zeros(4, dtype=dtype), own.clone(), own.clone()
            comm.all_gather(full, own[:4].clone(), "a")
            comm.reduce_scatter_mean(shard, own.clone(), "b")
            comm.all_reduce_mean(mean, "c")
            comm.broadcast(first, "d")
            results.append([full, shard, mean, first, comm.sum(own.float().clone(), "e")])
        for found, expected in zip(*results):
            torch.testing.assert_close(found, expected)
    dist.barrier()


def test_ranks_that_share_a_card_exchange_the_same(world2: Any) -> None:
    world2.run(exchanged)
