"""`CyberSLM`: token ids in, logits out.

    embed -> num_layers x (norm, attention, norm, feed-forward) -> norm -> head

A forward pass works out positions, the rotation and the mask once and hands them to every layer. One rule covers
padding on either side, chunked prefill and ragged batches: a token's position is the number of real tokens before it in
its row, and with a cache its key lies in the slot of that number. Parameter names are Hugging Face's Llama names less
the leading ``model.``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cyberslm.decoding.loop import complete
from cyberslm.decoding.sampling import SamplingParams
from cyberslm.errors import InputError
from cyberslm.model.attention import Sight, key_padding, visible
from cyberslm.model.block import DecoderBlock
from cyberslm.model.cache import KVCache, LayerCache
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.norm import RMSNorm
from cyberslm.model.rope import RotaryPositionEmbedding, Rotation

INIT_STD = 0.02


class _Pass(NamedTuple):
    """What one forward pass hands to every layer."""

    rotation: Rotation
    sight: Sight
    write: LayerCache | None = None
    """Where the new keys go; its ``keys`` and ``values`` are those of all layers."""
    new_tokens: list[int] | None = None
    """Real new tokens per row, with a cache."""

    def layer_cache(self, layer: int) -> LayerCache | None:
        if self.write is None:
            return None
        return self.write._replace(keys=self.write.keys[layer], values=self.write.values[layer])


class CyberSLM(nn.Module):
    """The network of ``config``, with weights drawn from ``seed``; ``device="meta"`` leaves them unallocated."""

    def __init__(self, config: CyberSLMConfig, *, seed: int = 0, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            # not by its constructor, whose initialisation on the meta device imports torch's compiler: a second
            rows = torch.empty(config.vocab_size, config.hidden_dim)
            self.embed_tokens = nn.Embedding.from_pretrained(rows, freeze=False)
            self.rope = RotaryPositionEmbedding(config.head_size, config.max_seq_len, config.rope_base)
            self.layers = nn.ModuleList(DecoderBlock(config, self.rope) for _ in range(config.num_layers))
            self.norm = RMSNorm(config.hidden_dim, config.norm_eps)
            self.lm_head = None if config.tie_weights else nn.Linear(config.hidden_dim, config.vocab_size, bias=False)
            self.dropout = nn.Dropout(config.dropout)
        if torch.device(device).type != "meta":
            self.to_empty(device=device)
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill every parameter and the rotary table: a pure function of ``seed`` and the configuration.

        Matrices are normal with std 0.02, those that write to the residual stream with 0.02 / sqrt(2 num_layers);
        gains are 1.
        """
        self.rope.reset()
        generator = torch.Generator().manual_seed(seed)
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            std = residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else INIT_STD
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def max_seq_len(self) -> int:
        return self.config.max_seq_len

    def new_cache(self, batch_size: int, capacity: int) -> KVCache:
        """An empty cache on the model's device, in its dtype."""
        return KVCache(self.config, batch_size=batch_size, capacity=capacity, dtype=self.dtype, device=self.device)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, cache: KVCache | None = None
    ) -> Tensor:
        """Logits ``(B, T, V)`` for int64 ``input_ids`` ``(B, T)``.

        ``attention_mask`` ``(B, past + T)`` marks real tokens 1 and padding 0, on either side; ``past`` is
        ``cache.columns``. With a cache the new tokens follow what it holds and are added to it.
        Raises `InputError` for a wrong shape or dtype, a full cache or a position past ``max_seq_len``.
        """
        return self.head(self.features(input_ids, attention_mask, cache=cache))

    def features(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, cache: KVCache | None = None
    ) -> Tensor:
        """The hidden state ``(B, T, D)`` that `head` turns into logits; arguments as in `forward`."""
        self._check_ids(input_ids)
        if cache is None:
            plan = self._plan(input_ids, attention_mask)
        else:
            plan = self._plan_cached(input_ids, attention_mask, cache)
        x = self.dropout(self.embed_tokens(input_ids))
        for index, layer in enumerate(self.layers):
            x = layer(x, plan.rotation, plan.sight, plan.layer_cache(index))
        if cache is not None and plan.new_tokens is not None:
            cache.advance(plan.new_tokens, input_ids.shape[1])
        return self.norm(x)

    def head(self, features: Tensor) -> Tensor:
        """Logits ``(..., V)`` of features ``(..., D)``."""
        return F.linear(features, self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight)

    def _check_ids(self, input_ids: Tensor) -> None:
        """Form always; values where looking at them doesn't make the host wait for a device."""
        if input_ids.ndim != 2 or not input_ids.numel() or input_ids.dtype not in (torch.int64, torch.int32):
            raise InputError(
                "input_ids must be a non-empty int64 tensor (batch, tokens),"
                f" not {input_ids.dtype} {tuple(input_ids.shape)}"
            )
        size = self.config.vocab_size
        if input_ids.device.type == "cpu" and not 0 <= int(input_ids.min()) <= int(input_ids.max()) < size:
            raise InputError(f"input_ids must hold ids from 0 to {size - 1} (vocab_size - 1)")

    def _plan(self, input_ids: Tensor, attention_mask: Tensor | None) -> _Pass:
        batch, new = input_ids.shape
        self.rope.require(new - 1)
        columns = torch.arange(new, device=input_ids.device)
        if attention_mask is None:
            return _Pass(self.rope.lookup(columns), Sight(None, causal=True))
        real = key_padding(attention_mask, batch, new)
        positions = (real.cumsum(1) - 1).masked_fill(~real, 0)
        columns = columns.unsqueeze(0)
        return _Pass(
            self.rope.lookup(positions), Sight(visible(columns, columns, q_real=real, k_real=real), causal=False)
        )

    def _plan_cached(self, input_ids: Tensor, attention_mask: Tensor | None, cache: KVCache) -> _Pass:
        batch, new = input_ids.shape
        device = input_ids.device
        if batch != cache.batch_size:
            raise InputError(f"input_ids has {batch} rows and the cache {cache.batch_size}")
        if not cache.fits(self.config):
            raise InputError(
                "the cache was made for another model: make it with new_cache of the model that it goes to"
            )
        real = None if attention_mask is None else self._new_columns(attention_mask, cache, new)
        added = [new] * batch if real is None else real.sum(1).tolist()
        longest = max(length + count for length, count in zip(cache.lengths, added, strict=True))
        if longest > cache.capacity:
            raise InputError(
                f"a row would hold {longest} tokens and the cache has room for {cache.capacity}:"
                " make it larger (up to max_seq_len)"
            )
        self.rope.require(longest - 1)
        past = torch.tensor(cache.lengths, device=device).unsqueeze(1)
        if real is None:
            positions = past + torch.arange(new, device=device)
        else:
            positions = (past + real.cumsum(1) - 1).masked_fill(~real, 0)
        slots = torch.arange(longest, device=device).unsqueeze(0)
        write = LayerCache(cache.keys, cache.values, cache.lengths[0], None, None, None, longest)
        if real is None and len(set(cache.lengths)) == 1:
            start = cache.lengths[0]
            causal, one = start == 0, new == 1
            sight = Sight(None if causal or one else visible(positions[:1], slots), causal=causal and not one)
            return _Pass(self.rope.lookup(positions[0]), sight, write, added)
        rows, columns = (torch.ones_like(positions) if real is None else real).nonzero(as_tuple=True)
        write = write._replace(start=None, rows=rows, slots=positions[rows, columns], columns=columns)
        return _Pass(
            self.rope.lookup(positions), Sight(visible(positions, slots, q_real=real), causal=False), write, added
        )

    @staticmethod
    def _new_columns(attention_mask: Tensor, cache: KVCache, new: int) -> Tensor:
        real = key_padding(attention_mask, cache.batch_size, cache.columns + new)
        if (held := real[:, : cache.columns].sum(1).tolist()) != cache.lengths:
            raise InputError(f"attention_mask marks {held} past tokens as real and the cache holds {cache.lengths}")
        return real[:, cache.columns :]

    def generate(  # noqa: PLR0913 (one keyword a setting, as people type them)
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        *,
        attention_mask: Tensor | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        eos_token_id: int | None = None,
    ) -> Tensor:
        """Continue each row of ``input_ids`` ``(B, T)``; return prompt and new ids ``(B, T + longest answer)``.

        Padding of the prompt may be on either side, marked by ``attention_mask``; the answer follows in the columns
        after the prompt, filled with ``pad_token_id`` once a row is done. A row ends with ``eos_token_id`` (default:
        the configuration's), which is part of the answer. The model's mode and the global random state stay as they
        were. Raises `GenerationError` for settings out of range or a prompt and budget that exceed ``max_seq_len``.
        """
        params = SamplingParams(
            max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
        )
        self._check_ids(input_ids.cpu())
        if attention_mask is None:
            prompts = input_ids.tolist()
        else:
            real = key_padding(attention_mask, *input_ids.shape)
            prompts = [row[keep].tolist() for row, keep in zip(input_ids, real, strict=True)]
        eos = self.config.eos_token_id if eos_token_id is None else eos_token_id
        answers = complete(self, prompts, [params] * len(prompts), stop_ids=frozenset({eos}))
        width = max(map(len, answers))
        pad = self.config.pad_token_id
        block = torch.tensor([answer + [pad] * (width - len(answer)) for answer in answers], dtype=input_ids.dtype)
        return torch.cat((input_ids, block.reshape(len(answers), width).to(input_ids.device)), dim=1)
