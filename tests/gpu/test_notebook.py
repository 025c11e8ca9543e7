"""Ranks behind a kernel that has used CUDA itself, one a GPU, as many as there are up to two."""

import pytest
import torch

from ftkit.errors import UserError
from ftkit.notebook import Ranks
from tests.tiny import make_base, write_rows

pytestmark = pytest.mark.gpu


def test_a_kernel_that_has_used_cuda_trains_and_asks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_base(tmp_path / "base")
    write_rows(tmp_path / "rows.jsonl", 50)
    recipe = {
        "model": {"name": "base"},
        "data": {"path": "rows.jsonl", "sequence_tokens": 32, "cache_dir": "cache"},
        "eval": {"share": 0.2},
        "train": {"batch_tokens": 192, "max_steps": 4},
        "output": {"dir": "run", "save_every_steps": 2},
    }
    assert torch.ones(3, device="cuda").sum().item() == 3
    number = min(torch.cuda.device_count(), 2)
    with Ranks(number) as ranks:
        cell = "import torch, torch.distributed as dist\nx = torch.ones(2, device=device)\n"
        cell += "dist.is_initialized() and dist.all_reduce(x)\n"
        ranks.run(f"{cell}found = (device.type, x.sum().item(), world_size)")
        assert ranks.view["found"] == [("cuda", 2.0 * number, number)] * number
        assert ranks.finetune(recipe)["steps"] == 4
        assert len(ranks.generate(["3+1?", "12+1?"], max_new_tokens=4)) == 2
        assert ranks.evaluate()["tokens"] > 0
        ranks.restart()
        ranks.run("step = trainer.state.global_step")
        assert ranks.view["step"] == [4] * number
    with pytest.raises(UserError, match="a rank needs a GPU of its own"):
        Ranks(torch.cuda.device_count() + 1).start()
