"""`CyberSLM`: token ids in, logits out.

    embed -> num_layers x (norm, attention, norm, feed-forward) -> norm -> head

A forward pass works out positions, the rotation and the mask once and hands them to every layer. One rule covers
padding on either side, chunked prefill and ragged batches: a token's position is the number of real tokens before it in
its row, and with a cache its key lies in the slot of that number. Parameter names are Hugging Face's Llama names less
the leading ``model.``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cyberslm.decoding.loop import complete
from cyberslm.decoding.request import Request
from cyberslm.decoding.sampling import SamplingParams, with_settings
from cyberslm.errors import GenerationError, InputError
from cyberslm.model.block import DecoderBlock
from cyberslm.model.cache import KVCache
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.norm import make_norm
from cyberslm.model.plan import Plan, over_cache, over_columns, over_documents
from cyberslm.model.quantised import PackedEmbedding, PackedLinear
from cyberslm.model.rope import RotaryPositionEmbedding
from cyberslm.model.sight import key_padding
from cyberslm.native.build import multiplies_bytes

INIT_STD = 0.02


Step = Callable[[Tensor, KVCache, Sequence[int]], Tensor | None]
"""`CyberSLM.next_logits` done faster; None to leave it to the network."""


def _block(layer: nn.Module, x: Tensor, plan: Plan) -> Tensor:
    return layer(x, plan, None)


class CyberSLM(nn.Module):
    """The network of ``config``, with weights drawn from ``seed``; ``device="meta"`` leaves them unallocated."""

    native = False
    """Whether `use_native` is on: losses of the model (`cyberslm.training.loss`) go by it too."""

    def __init__(self, config: CyberSLMConfig, *, seed: int = 0, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            # not by its constructor, whose initialisation on the meta device imports torch's compiler: a second
            rows = torch.empty(config.vocab_size, config.hidden_dim)
            self.embed_tokens = nn.Embedding.from_pretrained(rows, freeze=False)
            self.rope = RotaryPositionEmbedding.of(config)
            self.layers = nn.ModuleList(DecoderBlock(config, self.rope, layer) for layer in range(config.num_layers))
            self.norm = make_norm(config)
            self.lm_head = None if config.tie_weights else nn.Linear(config.hidden_dim, config.vocab_size, bias=False)
            self.dropout = nn.Dropout(config.dropout)
        self._compiled: Callable[[nn.Module, Tensor, Plan], Tensor] | None = None
        self._flex = False
        self._step: Step | None = None
        if torch.device(device).type != "meta":
            self.to_empty(device=device)
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill every parameter and the rotary table: a pure function of ``seed`` and the configuration.

        Matrices are normal with std 0.02, those that write to the residual stream with 0.02 / sqrt(2 num_layers);
        gains are 1, biases 0.
        """
        self.rope.reset()
        generator = torch.Generator().manual_seed(seed)
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
                continue
            std = residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else INIT_STD
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))

    def compile_blocks(self, *, on: bool = True, flex: bool = False) -> None:
        """Let ``torch.compile`` turn what all blocks do in training into one graph, at the next forward pass.

        Passes without gradients, whose shapes differ from call to call, stay as they are. With ``flex``, attention
        inside documents is torch's flex attention, which needs a GPU for gradients.
        """
        self._compiled = torch.compile(_block, dynamic=False) if on else None
        self._flex = flex

    def use_native(self, *, on: bool = True) -> None:
        """Let what has a form in C++ (`cyberslm.model.native`, `cyberslm.training.native`) take it, where it fits.

        The library must be there: `cyberslm.native.build.library` makes it, and says what is wrong where it can't. With
        int8 matrices, what lies between the products of a block is then in bf16.
        """
        for module in self.modules():
            if hasattr(type(module), "native"):
                setattr(module, "native", on)  # noqa: B010 (mypy takes an attribute for a tensor)
        narrow = on and self._is_int8 and multiplies_bytes()
        for layer in self.layers:
            cast(DecoderBlock, layer).narrow(on=narrow)

    @property
    def takes_flex(self) -> bool:
        """Whether `compile_blocks` had better be given ``flex`` for documents."""
        return self.device.type == "cuda" and not self.config.attn_dropout

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """That of the residual stream; matrices may be kept in another."""
        weight: Tensor = self.norm.get_parameter("weight")
        return weight.dtype

    @property
    def _is_int8(self) -> bool:
        return self.embed_tokens.weight.dtype == torch.int8

    @property
    def max_seq_len(self) -> int:
        return self.config.max_seq_len

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def keys_follow_length(self) -> bool:
        return self.rope.by_length

    def new_cache(self, batch_size: int, capacity: int | Sequence[int], *, dtype: torch.dtype | None = None) -> KVCache:
        """An empty cache on the model's device, in ``dtype``, else bf16 with int8 matrices, else the model's dtype.

        With rope scaling of type dynamic, ``capacity`` also says for which length angles are stretched.
        """
        own = torch.bfloat16 if self._is_int8 else self.dtype
        wanted = own if dtype is None else dtype
        return KVCache(self.config, batch_size=batch_size, capacity=capacity, dtype=wanted, device=self.device)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        docs: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Logits ``(B, T, V)`` for int64 or int32 ``input_ids`` ``(B, T)``.

        ``attention_mask`` ``(B, past + T)`` marks real tokens 1 and padding 0, on either side; ``past`` is
        ``cache.columns``. ``docs`` ``(B, T)`` numbers each position's document: equal numbers of a row see each other,
        and positions begin anew in each. With a cache the new tokens follow what it holds and are added to it; such a
        pass records no gradients.
        Raises `InputError` for a wrong shape or dtype, a full cache or a position past ``max_seq_len``.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            return self.head(self.features(input_ids, attention_mask, docs=docs, cache=cache))

    def features(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        docs: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """The hidden state ``(B, T, D)`` that `head` turns into logits; arguments as in `forward`."""
        self._check_ids(input_ids)
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            run = self._compiled if self.training and torch.is_grad_enabled() else None
            plan = self._plan(input_ids, attention_mask, docs, cache, blocks=self._flex and run is not None)
            x = self.embed_tokens(input_ids).to(self.dtype)
            if plan.real is not None:
                x = x.masked_fill(~plan.real.unsqueeze(-1), 0.0)
            x = self.dropout(x)
            for index, layer in enumerate(self.layers):
                held = None if cache is None else cache.layers[index]
                x = layer(x, plan, held) if run is None else run(layer, x, plan)
            if cache is not None:
                cache.advance(plan.new_tokens, input_ids.shape[1])
            return self.norm(x)

    def use_step(self, step: Step | None) -> None:
        """Let `next_logits` ask ``step`` first; None = the network alone.

        A step reads the weights where they lie: a network that is moved or cast goes on without it, and so do copies.
        """
        self._step = step

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, FBT001, FBT002
        self.use_step(None)
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_step": None}

    def next_logits(self, tokens: Tensor, cache: KVCache, counts: Sequence[int] | None = None) -> Tensor:
        """Logits ``(N, V)`` after each of the tokens ``(N,)``, which are added to the cache.

        ``counts[b]`` of them, at least one, belong to row b, in order and row after row; default: one to each. The same
        as `features` and `head`, by a faster step where one was given. Records no gradients.
        """
        counts = [1] * cache.batch_size if counts is None else counts
        if len(counts) != cache.batch_size or min(counts) < 1 or sum(counts) != len(tokens):
            raise InputError(
                f"{len(tokens)} tokens were given for the {cache.batch_size} rows of the cache, {list(counts)} each"
            )
        if self._step is not None and not self.training:
            self._check_ids(tokens.unsqueeze(0))
            if (logits := self._step(tokens, cache, counts)) is not None:
                return logits
        with torch.no_grad():
            return self.head(self._features_after(tokens, cache, counts))

    def _features_after(self, tokens: Tensor, cache: KVCache, counts: Sequence[int]) -> Tensor:
        longest = max(counts)
        if min(counts) == longest:
            return self.features(tokens.view(-1, longest), cache=cache).flatten(0, 1)
        ids = torch.nn.utils.rnn.pad_sequence(tokens.split(list(counts)), batch_first=True)
        ends = torch.tensor([cache.lengths, list(counts)], device=tokens.device).unsqueeze(-1)
        past, new = (torch.arange(n, device=tokens.device) for n in (cache.columns, longest))
        real = new < ends[1]
        return self.features(ids, torch.cat((past < ends[0], real), dim=1), cache=cache)[real]

    @property
    def head_weight(self) -> Tensor:
        """``(V, D)``: the embedding's own where they are tied."""
        source = self.embed_tokens if self.lm_head is None else self.lm_head
        return source.matrix().to(self.dtype) if isinstance(source, PackedEmbedding | PackedLinear) else source.weight

    def head(self, features: Tensor) -> Tensor:
        """Logits ``(..., V)`` of features ``(..., D)``."""
        source = self.embed_tokens if self.lm_head is None else self.lm_head
        if isinstance(source, PackedEmbedding | PackedLinear):
            logits = source.product(features)
        else:
            logits = F.linear(features, source.weight.to(features.dtype))
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _plan(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        docs: Tensor | None,
        cache: KVCache | None,
        *,
        blocks: bool,
    ) -> Plan:
        windows = self.config.windows
        if blocks and docs is not None and docs.shape == input_ids.shape and attention_mask is None and cache is None:
            return over_documents(docs, rope=self.rope, windows=windows)
        if cache is None:
            return over_columns(input_ids, attention_mask, docs, rope=self.rope, windows=windows)
        if docs is not None:
            raise InputError("docs and cache were given together: packed documents are for passes without a cache")
        if not cache.fits(self.config):
            raise InputError(
                "the cache was made for another model: make it with new_cache of the model that it goes to"
            )
        return over_cache(input_ids, attention_mask, cache, rope=self.rope, windows=windows)

    def _check_ids(self, input_ids: Tensor) -> None:
        """Form always; values where looking at them doesn't make the host wait for a device."""
        if input_ids.ndim != 2 or not input_ids.numel() or input_ids.dtype not in (torch.int64, torch.int32):
            raise InputError(
                "input_ids must be a non-empty int64 or int32 tensor (batch, tokens),"
                f" not {input_ids.dtype} {tuple(input_ids.shape)}"
            )
        size = self.config.vocab_size
        if input_ids.device.type == "cpu" and not 0 <= int(input_ids.min()) <= int(input_ids.max()) < size:
            raise InputError(f"input_ids must hold ids from 0 to {size - 1} (vocab_size - 1)")

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        *,
        attention_mask: Tensor | None = None,
        eos_token_id: int | None = None,
        **settings: object,
    ) -> Tensor:
        """Continue each row of ``input_ids`` ``(B, T)``; return prompt and new ids ``(B, T + longest answer)``.

        ``settings`` are fields of `SamplingParams`, such as ``temperature`` and ``seed``; greedy without. With ``n``
        answers each row comes ``n`` times. Padding of the prompt may be on either side, marked by ``attention_mask``;
        the answer follows in the columns after the prompt, filled with ``pad_token_id`` once a row is done. A row ends
        with ``eos_token_id`` (default: the configuration's), which is part of the answer. The model's mode and the
        global random state stay as they were (several threads may share a model only in evaluation mode). With rope
        scaling of type dynamic, prompt plus budget is the length that angles are stretched for. Raises
        `GenerationError` for settings out of range, those that need a tokenizer, or a prompt and budget that exceed
        ``max_seq_len``.
        """
        params = with_settings(SamplingParams(max_new_tokens=max_new_tokens), settings)
        if params.stop or params.logprobs is not None:
            name = "stop" if params.stop else "logprobs"
            raise GenerationError(
                f"{name} is for Engine.generate, which has text and more than ids to give: leave it out"
            )
        self._check_ids(input_ids.cpu())
        if attention_mask is None:
            prompts = input_ids.tolist()
        else:
            real = key_padding(attention_mask, *input_ids.shape)
            prompts = [row[keep].tolist() for row, keep in zip(input_ids, real, strict=True)]
        eos = self.config.eos_token_id if eos_token_id is None else eos_token_id
        found = complete(self, [Request(prompt, params) for prompt in prompts], stop_ids=frozenset({eos}))
        answers = [answer for answers in found for answer in answers]
        width = max(map(len, answers))
        pad = self.config.pad_token_id
        block = torch.tensor([answer + [pad] * (width - len(answer)) for answer in answers], dtype=input_ids.dtype)
        repeated = input_ids.repeat_interleave(params.n, dim=0)
        return torch.cat((repeated, block.reshape(len(answers), width).to(input_ids.device)), dim=1)
