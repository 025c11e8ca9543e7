"""`ftkit doctor` and `ftkit measure`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ftkit.cli.options import Dtype, Json, Nproc, NvmeDir, echo_json, rank_count, say, screen, start_ranks
from ftkit.config.wording import counted
from ftkit.errors import UserError
from ftkit.output.run_folder import check_target


def doctor(nvme_dir: NvmeDir = None, as_json: Json = False) -> None:
    """Check GPUs, driver, torch, Triton and host, and print fixes. The exit code is 1 if a check fails."""
    from ftkit.cli.doctor import judge, show
    from ftkit.cli.probe import probe

    facts = probe(nvme_dir)
    findings = judge(facts)
    if as_json:
        echo_json({"findings": [asdict(each) for each in findings], "probe": asdict(facts)})
    else:
        show(findings, screen())
    raise typer.Exit(int(any(each.verdict == "fail" for each in findings)))


def measure(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE.yaml", help="Hardware profile to write.")],
    nproc: Nproc = None,
    dtype: Annotated[Dtype | None, typer.Option("--dtype", help="Compute dtype. Default: as `train.dtype: auto`.")] = None,
    nvme_dir: NvmeDir = None,
) -> None:
    """Measure compute, links and memory of this machine for `ftkit plan`. Takes a minute or two, all ranks busy.

    The profile is read by `ftkit plan --hardware FILE.yaml` and by `hardware: FILE.yaml` in a recipe.
    """
    if out.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out: {out} must end in .yaml: `ftkit plan --hardware` recognises a file by this ending")
    check_target(out, "--out", ".yaml", ".yml")
    ranks = rank_count(nproc)
    from ftkit.cli.measure import profile, write_profile
    from ftkit.cli.probe import measure_drive
    from ftkit.train.arguments import compute_dtype

    drive = None if nvme_dir is None else measure_drive(nvme_dir)
    if drive is not None and "error" in drive:
        raise UserError(f"--nvme-dir: {drive['error']}")
    wanted = compute_dtype(dtype.value if dtype is not None else "auto")
    rates = start_ranks("ftkit.cli.measure:rank", (wanted,), ranks)
    write_profile(out, profile(rates, wanted, drive, ranks), ranks)
    say(f"measured with {counted(ranks, 'rank')}: {out}")
