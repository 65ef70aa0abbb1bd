"""Tensors are written one by one, in the bytes that the safetensors library would write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cyberslm.checkpoint.tensors import Kind, write_tensors
from cyberslm.errors import InputError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_are_those_of_the_library(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"b.weight": (3, 5), "a": (), "model.\u00e9": (7,), "none": (0, 4)}
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    write_tensors(tmp_path / "ours", {name: Kind.of(t) for name, t in tensors.items()}, tensors.__getitem__)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_mixed_types_come_back(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.tensor([True, False])}
    write_tensors(tmp_path / "t", {name: Kind.of(t) for name, t in tensors.items()}, tensors.__getitem__)
    found = load_file(tmp_path / "t")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_values_are_cast_to_what_was_announced_and_other_shapes_are_refused(tmp_path: Path) -> None:
    value = torch.full((2, 2), 1.00390625)
    write_tensors(tmp_path / "t", {"a": Kind(torch.bfloat16, (2, 2))}, lambda _: value)
    assert torch.equal(load_file(tmp_path / "t")["a"], value.bfloat16())
    with pytest.raises(InputError, match="tensor a has shape"):
        write_tensors(tmp_path / "t", {"a": Kind(torch.float32, (4,))}, lambda _: value)
