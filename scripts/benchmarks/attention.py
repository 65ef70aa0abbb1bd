"""The network against transformers' Llama, and attention inside packed documents against plain causal attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from harness import Group, main, seconds
from torch.nn import functional as F

from cyberslm.checkpoint.hf import disk_name, hf_config
from cyberslm.data.loader import Batch
from cyberslm.model.causal import causal_attention
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.kernels import fused
from cyberslm.model.model import CyberSLM
from cyberslm.model.native import native_attention
from cyberslm.model.sight import Sight, find_runs
from cyberslm.training.loss import next_token_loss

ROWS, TOKENS = 8, 512
CONFIG = CyberSLMConfig()
PACKED_TOKENS = 1024


def random_batch() -> Batch:
    ids = torch.randint(4, CONFIG.vocab_size, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def ours() -> float:
    model, batch = CyberSLM(CONFIG).train(), random_batch()

    def step() -> None:
        next_token_loss(model, batch).objective.backward()
        model.zero_grad(set_to_none=True)

    return 1000 * seconds(step, warm_up=1, repeats=3)


def llama() -> float:
    import transformers

    config = transformers.LlamaConfig(**{key: value for key, value in hf_config(CONFIG).items() if key != "cyberslm"})
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").train()
    weights = {disk_name(name): value for name, value in CyberSLM(CONFIG).named_parameters()}
    model.load_state_dict(weights, strict=False)
    batch = random_batch()

    def step() -> None:
        model(batch.input_ids, shift_labels=batch.targets, labels=batch.targets, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    return 1000 * seconds(step, warm_up=1, repeats=3)


def attention(documents: int) -> float:
    """Forward and backward of one layer's kernel; ``documents`` a row, of random lengths, 0 for a plain causal row."""
    generator = torch.Generator().manual_seed(documents)
    q, k, v = (torch.randn(ROWS, 6, PACKED_TOKENS, 64, generator=generator).requires_grad_() for _ in range(3))
    docs = torch.zeros(ROWS, PACKED_TOKENS, dtype=torch.int64)
    for row in range(ROWS):
        cuts = torch.randperm(PACKED_TOKENS - 1, generator=generator)[: max(0, documents - 1)] + 1
        docs[row, cuts] = 1
    docs = docs.cumsum(1)

    def step() -> None:
        sight = Sight(runs=find_runs(None, docs)) if documents else Sight(causal=True)
        fused(q, k, v, sight, 0.125, 0.0).sum().backward()

    return 1000 * seconds(step, warm_up=2, repeats=5)


def kernel(mix: Callable[..., torch.Tensor], dtype: torch.dtype) -> float:
    """Forward and backward of causal rows, as a block of the reference model has them."""
    q, k, v, grad = (torch.randn(ROWS, TOKENS, 6, 64).transpose(1, 2).to(dtype) for _ in range(4))
    inputs = [t.requires_grad_() for t in (q, k, v)]

    def step() -> None:
        torch.autograd.grad(mix(*inputs), inputs, grad)

    return 1000 * seconds(step, warm_up=2, repeats=9)


KERNELS = {
    "torch": partial(F.scaled_dot_product_attention, is_causal=True, scale=0.125),
    "blocks of products": partial(causal_attention, scale=0.125),
    "loops in C++": partial(native_attention, sight=Sight(causal=True), scale=0.125),
}


main(
    {
        **{
            f"causal attention forward + backward, {ROWS} x 6 heads x {TOKENS} x 64, {name}": Group(
                {each: partial(kernel, mix, dtype) for each, mix in KERNELS.items()}
            )
            for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
        },
        f"forward + backward, 33.5 M, {ROWS} x {TOKENS}, fp32": Group(
            {"transformers Llama, SDPA": llama, "cyberslm": ours}
        ),
        f"attention forward + backward, {ROWS} x 6 heads x {PACKED_TOKENS} x 64, fp32": Group(
            {
                "plain causal": lambda: attention(0),
                **{f"{count} documents a row": lambda count=count: attention(count) for count in (1, 4, 16, 64)},
            }
        ),
    },
    packages=("torch", "transformers"),
)
