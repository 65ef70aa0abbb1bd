"""Weights on their way from the file: the same bits as read whole and rounded afterwards, held once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cyberslm.checkpoint import weights
from cyberslm.checkpoint.folder import WEIGHTS, load_model, save_model
from cyberslm.checkpoint.hf import disk_name
from cyberslm.checkpoint.tensors import TensorFile
from cyberslm.checkpoint.weights import read_weights
from cyberslm.errors import ConfigError, InputError, IntegrityError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.model.quantised import set_precision
from cyberslm.model.stretch import HUGE_PAGE, matrices
from cyberslm.text.tokenizer import load_tokenizer

SIZES = {"hidden_dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_dim": 96, "max_seq_len": 40}


@pytest.fixture(scope="module", params=["tied", "untied, biases"])
def folder(request: pytest.FixtureRequest, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = load_tokenizer(trained / "run" / "final")
    more = {} if request.param == "tied" else {"tie_weights": False, "bias": True, "norm": "layer"}
    config = CyberSLMConfig(vocab_size=tokenizer.vocab_size, **SIZES, **more)
    target = tmp_path_factory.mktemp("weights") / "model"
    save_model(target, CyberSLM(config, seed=3), tokenizer, {})
    return target


@pytest.mark.parametrize("block", [1, 1000, 1 << 18])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
def test_rounding_by_rows_is_rounding_the_whole(
    folder: Path, precision: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "BLOCK", block)
    whole = CyberSLM(load_model(folder).model.config)
    held = load_file(folder / WEIGHTS)
    whole.load_state_dict({name: held[disk_name(name)] for name in whole.state_dict()})
    set_precision(whole, precision)
    found, wanted = load_model(folder, precision=precision).model.state_dict(), whole.state_dict()
    assert found.keys() == wanted.keys()
    assert all(found[name].dtype == tensor.dtype for name, tensor in wanted.items())
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_matrices_lie_one_behind_the_other(folder: Path, precision: str) -> None:
    """In the order in which a step reads them, each at the beginning of a cache line."""
    places = [module.weight for module in matrices(load_model(folder, precision=precision).model)]
    assert places[0].data_ptr() % HUGE_PAGE == 0
    for before, after in zip(places, places[1:], strict=False):
        gap = after.data_ptr() - before.data_ptr() - before.numel() * before.element_size()
        assert 0 <= gap < 64
        assert after.data_ptr() % 64 == 0


def test_bits_that_a_file_lacks_are_not_made_up(folder: Path, tmp_path: Path) -> None:
    small = load_model(folder, precision="int8")
    save_model(tmp_path / "small", small.model, small.tokenizer, {})
    with pytest.raises(ConfigError, match="kept in int8 and can't be turned to bf16"):
        load_model(tmp_path / "small", reduced="take", precision="bf16")


def test_a_file_that_ends_early_is_named(folder: Path, tmp_path: Path) -> None:
    """Also where it is cut after its header was checked."""
    config = load_model(folder).model.config
    short = tmp_path / "short.safetensors"
    short.write_bytes((folder / WEIGHTS).read_bytes()[:-1])
    with pytest.raises(IntegrityError, match=r"short.safetensors can't be read"):
        read_weights(short, config, "fp32", precision="fp32", device="cpu")
    with TensorFile(short) as file:
        name = "model.norm.weight"
        last = max((key for key in load_file(folder / WEIGHTS)), key=lambda key: file._entries[key]["data_offsets"][1])
        with pytest.raises(IntegrityError, match=f"ends within tensor {last}"):
            file.read(last, torch.empty(file.kind(last).shape))
        with pytest.raises(InputError, match="can't be read from row 60"):
            file.read(name, torch.empty(5), first_row=60)


PROGRAM = """
import re, sys
from pathlib import Path
import torch
from cyberslm.checkpoint.folder import load_model
def status(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
load_model(sys.argv[2], precision=sys.argv[3])
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
model = load_model(sys.argv[1], precision=sys.argv[3]).model
print(status("VmHWM") - before, sum(t.nbytes for t in model.state_dict().values()), "torch._dynamo" in sys.modules)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is measured with Linux's /proc")
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_process_holds_the_weights_once(folder: Path, trained: Path, tmp_path: Path, precision: str) -> None:
    """The mapped file, its copy, the fp32 matrices behind int8 and torch's compiler were all held at once."""
    tokenizer = load_tokenizer(trained / "run" / "final")
    large = CyberSLMConfig(vocab_size=32_000, hidden_dim=512, num_layers=1, num_heads=8, max_seq_len=64)
    save_model(tmp_path / "large", CyberSLM(large), tokenizer, {})
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "large"), str(folder), precision]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert said[2] == "False"
    assert int(said[0]) < 1.1 * int(said[1]) + (8 << 20)
