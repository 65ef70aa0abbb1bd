"""The structures of `step.cpp` and how a network fills them.

Weights are held once, in one stretch of huge pages (`cyberslm.model.stretch`): what is changed in place is changed for
both. Vectors that aren't fp32 are widened anew before each step.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from cyberslm.errors import ConfigError
from cyberslm.model.cache import KVCache
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.ffn import ACTIVATIONS
from cyberslm.model.model import CyberSLM
from cyberslm.model.norm import LayerNorm
from cyberslm.model.quantised import PackedEmbedding, PackedLinear
from cyberslm.model.stretch import gather, matrices

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}

_Pointer, _Int, _Real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class _Matrix(ctypes.Structure):
    _fields_ = [(name, _Pointer) for name in ("weight", "scales", "bias")] + [
        (name, _Int) for name in ("rows", "columns", "kind")
    ]


class _Norm(ctypes.Structure):
    _fields_ = [("weight", _Pointer), ("bias", _Pointer), ("eps", _Real), ("layer", _Int)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Norm) for name in ("before_attention", "before_mlp", "q_norm", "k_norm")),
        *((name, _Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        ("window", _Int),
    ]


_SIZES = (
    *("num_layers", "hidden", "heads", "kv_heads", "key_size", "head_size", "inner"),
    *("activation", "interleaved", "threads"),
)


class _Network(ctypes.Structure):
    _fields_ = [
        ("layers", _Pointer),
        ("embedding", _Matrix),
        ("head", _Matrix),
        ("norm", _Norm),
        *((name, _Int) for name in _SIZES),
        ("scale", _Real),
        ("softcap", _Real),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, _Pointer) for name in ("tokens", "places", "angles", "starts", "cos", "sin", "caches")),
        *((name, _Pointer) for name in ("logits", "scratch")),
        *((name, _Int) for name in ("tokens_fed", "rows", "room", "cache_kind")),
    ]


class NativeStep:
    """Steps of one token a row, or a few, by the library. Raises `ConfigError` for a network that it can't run."""

    def __init__(self, model: CyberSLM, library: ctypes.CDLL, *, threads: int) -> None:
        if (reason := why_not(model)) is not None:
            raise ConfigError(f"the compiled decoding step can't run this network: {reason}")
        self._library, self._rope, self._config = library, model.rope, model.config
        gather(model)
        self._kept: list[object] = []
        self._narrow = _gathered_vectors(model)
        self._wide = self._narrow.float()
        self._layers = (_Layer * model.config.num_layers)(*(self._layer(block) for block in model.layers))
        embedding = self._matrix(model.embed_tokens)
        self._network = _Network(
            ctypes.addressof(self._layers),
            embedding,
            embedding if model.lm_head is None else self._matrix(model.lm_head),
            self._norm(model.norm),
            *_sizes(model.config, threads),
            model.config.score_scale,
            model.config.logit_softcap or 0.0,
        )
        self._scratch_for: tuple[int, int] | None = None
        self._scratch = torch.empty(0)
        self._one_at_a_time = threading.Lock()

    def __call__(self, tokens_N: Tensor, cache: KVCache, counts: Sequence[int]) -> Tensor:
        """Logits ``(N, V)``, fp32, after each of the tokens ``(N,)``, of which ``counts[b]`` belong to row b.

        They are added to the cache. Ids must have been checked. Raises `InputError` for a full cache.
        """
        longest = cache.admit(counts)
        self._rope.require(longest - 1)
        cache.reserve(longest)
        held = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        caches = (_Pointer * len(held))(*(t.data_ptr() for t in held))
        places = torch.tensor(
            [place for start, count in zip(cache.lengths, counts, strict=True) for place in range(start, start + count)]
        )
        starts = torch.tensor([0, *accumulate(counts)])
        tokens = tokens_N.to(torch.int64).contiguous()
        angles, cos, sin = self._angles(places, cache, counts)
        logits = torch.empty(len(tokens), self._config.vocab_size)
        room = held[0].shape[2]
        with self._one_at_a_time:
            self._wide.copy_(self._narrow)
            step = _Step(
                *(t.data_ptr() for t in (tokens, places, angles, starts, cos, sin)),
                ctypes.addressof(caches),
                logits.data_ptr(),
                self._scratch_of(len(tokens), room).data_ptr(),
                *(len(tokens), len(counts), room, KINDS[held[0].dtype]),
            )
            self._library.decode_step(ctypes.addressof(self._network), ctypes.addressof(step))
        cache.advance(counts, max(counts))
        return logits

    def takes(self, cache: KVCache) -> bool:
        """Whether the step can read and write this cache."""
        return cache.fits(self._config) and all(
            t.dtype in (torch.float32, torch.bfloat16) and t.is_contiguous() and not t.is_inference()
            for t in (cache.layers[0].keys, cache.layers[0].values)
        )

    def _angles(self, places: Tensor, cache: KVCache, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Each token's place in a table of cosines and sines ``(.., key_dim / 2)``, and the two tables."""
        if not self._rope.by_length:
            return places, self._rope.cos, self._rope.sin
        ends = torch.tensor(cache.capacities).repeat_interleave(torch.tensor(counts))
        return torch.arange(len(places)), *self._rope.half_angles(places, ends)

    def _scratch_of(self, tokens: int, room: int) -> Tensor:
        if self._scratch_for != (tokens, room):
            floats = self._library.scratch_floats(ctypes.addressof(self._network), tokens, room)
            self._scratch_for, self._scratch = (tokens, room), torch.zeros(floats)
        return self._scratch

    def _layer(self, block: Any) -> _Layer:
        attention, mlp = block.self_attn, block.mlp
        norms = block.input_layernorm, block.post_attention_layernorm, attention.q_norm, attention.k_norm
        matrices = *attention.projections(), mlp.gate_proj, mlp.up_proj, mlp.down_proj
        return _Layer(*map(self._norm, norms), *map(self._matrix, matrices), attention.window or 0)

    def _matrix(self, module: Any) -> _Matrix:
        if module is None:
            return _Matrix()
        weight, scales, bias = module.weight, getattr(module, "scales", None), getattr(module, "bias", None)
        columns = weight.shape[1] * (2 if weight.dtype == torch.uint8 else 1)
        pointers = weight.data_ptr(), self._pointer(scales), self._pointer(bias)
        self._kept.append(weight)
        return _Matrix(*pointers, weight.shape[0], columns, KINDS[weight.dtype])

    def _norm(self, module: Any) -> _Norm:
        if module is None:
            return _Norm()
        bias = self._pointer(getattr(module, "bias", None))
        return _Norm(self._pointer(module.weight), bias, module.eps, isinstance(module, LayerNorm))

    def _pointer(self, vector: Tensor | None) -> int | None:
        """Of a vector in fp32: its own, or where it is widened to."""
        if vector is None:
            return None
        self._kept.append(vector)
        if vector.dtype == torch.float32:
            return vector.data_ptr()
        return self._wide.data_ptr() + 2 * (vector.data_ptr() - self._narrow.data_ptr())


def why_not(model: CyberSLM) -> str | None:
    """Why the library can't run ``model``; None if it can."""
    if model.device.type != "cpu":
        return f"it is on {model.device}, not on the CPU"
    for module in matrices(model):
        if type(module) not in (nn.Linear, nn.Embedding, PackedLinear, PackedEmbedding):
            return f"a layer of type {type(module).__name__} is not a plain matrix (merge adapters first)"
        if module.weight.dtype not in KINDS:
            return f"its weights are {module.weight.dtype}"
    return None


def _gathered_vectors(model: CyberSLM) -> Tensor:
    """Norms and biases in bf16, moved into one tensor."""
    vectors = [p for p in model.parameters() if p.ndim == 1 and p.dtype == torch.bfloat16]
    together = torch.cat([torch.empty(0, dtype=torch.bfloat16), *(p.detach() for p in vectors)])
    for parameter, part in zip(vectors, together.split([len(p) for p in vectors]), strict=True):
        parameter.data = part
    return together


def _sizes(config: CyberSLMConfig, threads: int) -> tuple[int, ...]:
    heads = config.num_heads, config.kv_heads, config.key_size, config.head_size
    activation = list(ACTIVATIONS).index(config.activation)
    interleaved = config.rope_layout == "interleaved"
    return config.num_layers, config.hidden_dim, *heads, config.ffn_hidden_dim, activation, interleaved, threads
