"""A fine-tuning run in two processes, held against that of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import write_corpus
from ranks import all_of, in_ranks
from safetensors.torch import load_file

from cyberslm.checkpoint.steps import list_steps
from cyberslm.recipes.finetune import load_finetune
from cyberslm.recipes.train import run_training

YAML = """
out_dir: {name}
base: {base}
precision: fp32
data: {{sources: [text], validation_fraction: 0.2}}
train: {{max_steps: 8, micro_batch_size: 2, global_batch_size: 4}}
optimizer: {{lr: 3.0e-3}}
scheduler: {{warmup_steps: 2}}
eval: {{interval: 4, max_rows: 8}}
checkpoint: {{interval: 4}}
logging: {{plots: false, probe: false}}
"""


def one(path: str, overrides: tuple[str, ...]) -> int:
    return run_training(load_finetune(path, overrides), quiet=True).state.step


@pytest.mark.parametrize("overrides", [("lora={rank: 4}",), ("distributed.strategy=fsdp",)])
def test_run_of_two_processes_is_that_of_one(tmp_path: Path, trained: Path, overrides: tuple[str, ...]) -> None:
    write_corpus(tmp_path / "text", documents=20)
    for name in ("alone", "together"):
        (tmp_path / f"{name}.yaml").write_text(YAML.format(name=name, base=trained / "run"))
    one(str(tmp_path / "alone.yaml"), overrides if "lora" in overrides[0] else ())
    assert all_of(in_ranks(one, str(tmp_path / "together.yaml"), overrides)) == [8, 8]
    mine, theirs = (tmp_path / name for name in ("together", "alone"))
    for each in ("final/model.safetensors", "training"):
        places = [run / each for run in (mine, theirs)]
        if each == "training":
            places = [
                list_steps(run / "checkpoints")[-1].path / "training/optimizer.safetensors" for run in (mine, theirs)
            ]
        found, wanted = map(load_file, places)
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-3, atol=2e-5)
