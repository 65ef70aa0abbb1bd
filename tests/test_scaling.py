"""scripts/scaling.py: what it simulates is what two real ranks hold and send."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from ranks import all_of, in_ranks

from cyberslm.model.config import CyberSLMConfig
from cyberslm.training.distributed import DistributedConfig, joined

SCRIPT = Path(__file__).parents[1] / "scripts" / "scaling.py"
CONFIG = CyberSLMConfig(vocab_size=41, hidden_dim=32, num_layers=3, num_heads=2, ffn_hidden_dim=48, max_seq_len=16)


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scaling"] = module
    spec.loader.exec_module(module)
    return module


def counted(strategy: str, world: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    scaling = script()
    with joined(DistributedConfig(strategy=strategy), torch.device("cpu")) as dist:
        assert dist.world == world
        held, sent, _ = scaling.counted(CONFIG, dist, micro_batches=3)
    return tuple(vars(held).values()), tuple(vars(sent).values())


@pytest.mark.parametrize("world", [2, 3])
def test_simulated_rank_holds_and_sends_what_a_real_one_does(world: int) -> None:
    real = all_of(in_ranks(counted, "fsdp", world, world=world))[0]
    held, sent = script().simulated(CONFIG, world, micro_batches=3)
    assert real == (tuple(vars(held).values()), tuple(vars(sent).values()))
    assert sent.gathers == 3 * (1 + 2 * CONFIG.num_layers)
    assert sent.scatters == 1 + CONFIG.num_layers, "gradients are exchanged in the last micro-batch alone"


def test_formula_of_ddp_is_what_two_real_ranks_hold_and_send() -> None:
    (held, sent), _ = all_of(in_ranks(counted, "ddp", 2))
    wanted, size = script().ddp_by_formula(CONFIG, 2)
    assert (held, sent[-1]) == (tuple(vars(wanted).values()), size)


def test_bf16_halves_what_blocks_send_to_be_gathered() -> None:
    scaling = script()
    sent = [scaling.simulated(CONFIG, 4, precision=precision)[1].bytes for precision in ("fp32", "bf16")]
    blocks = CONFIG.num_parameters - replace(CONFIG, num_layers=1).num_parameters
    blocks = blocks * CONFIG.num_layers // (CONFIG.num_layers - 1)
    assert sent[0] - sent[1] == 2 * 2 * blocks * 3 // 4
