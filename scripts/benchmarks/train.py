"""Training steps of the 33.5 M reference model against the peers that people would use instead.

A figure is tokens per second of whole steps: forward, backward, clipping to norm 1, AdamW (fused). Peers run as their
documents say (bf16 autocast, SDPA), once as installed and once with the memory settings that `cyberslm train` makes for
itself. Each contender also reports the peak memory of its process. litgpt and dual-attention take part if installed;
litgpt's head is tied to its embedding, as all others' are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

from harness import Figures, Group, main, peak_mib, seconds
from peers import dual_attention

SIZES = ((8, 512), (4, 1024))


class Contender(NamedTuple):
    """What makes a loss function of (rows, tokens), and the settings of its process."""

    make: Callable[[int, int], tuple[Callable, list]]
    tuned: bool = True


def cyberslm(
    rows: int, tokens: int, *, compiled: bool = False, native: bool = True, bf16: bool = True
) -> tuple[Callable, list]:
    import torch

    from cyberslm.data.loader import Batch
    from cyberslm.model.config import CyberSLMConfig
    from cyberslm.model.model import CyberSLM
    from cyberslm.native.build import library
    from cyberslm.training.compiled import compile_and_try
    from cyberslm.training.loss import next_token_loss

    model, batch = CyberSLM(CyberSLMConfig()).train(), Batch(*token_rows(rows, tokens))
    if native:
        library()
    model.use_native(on=native)
    cast = partial(torch.autocast, "cpu", dtype=torch.bfloat16, enabled=bf16)
    if compiled and (reason := compile_and_try(model, next_token_loss, batch, cast)) is not None:
        raise RuntimeError(reason)

    def loss() -> torch.Tensor:
        with cast():
            output = next_token_loss(model, batch)
        return output.objective / output.num_tokens

    return loss, list(model.parameters())


def llama(rows: int, tokens: int, *, compiled: bool) -> tuple[Callable, list]:
    import torch
    import transformers

    from cyberslm.checkpoint.hf import hf_config
    from cyberslm.model.config import CyberSLMConfig

    settings = {key: value for key, value in hf_config(CyberSLMConfig()).items() if key != "cyberslm"}
    config = transformers.LlamaConfig(**settings)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").train()
    run = torch.compile(model) if compiled else model
    ids, targets = token_rows(rows, tokens)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return run(ids, labels=targets, shift_labels=targets, use_cache=False).loss

    return loss, list(model.parameters())


def litgpt(rows: int, tokens: int) -> tuple[Callable, list]:
    import torch
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    from cyberslm.model.config import CyberSLMConfig

    ours = CyberSLMConfig()
    config = Config(
        n_layer=ours.num_layers,
        n_head=ours.num_heads,
        n_embd=ours.hidden_dim,
        intermediate_size=ours.ffn_hidden_dim,
        vocab_size=ours.vocab_size,
        padded_vocab_size=ours.vocab_size,
        block_size=ours.max_seq_len,
        mlp_class_name="LLaMAMLP",
        norm_class_name="RMSNorm",
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
    )
    model, (ids, targets) = GPT(config).train(), token_rows(rows, tokens)
    model.lm_head.weight = model.transformer.wte.weight

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return chunked_cross_entropy(model(ids), targets)

    return loss, list(model.parameters())


def reference(rows: int, tokens: int) -> tuple[Callable, list]:
    import torch

    from cyberslm.model.config import CyberSLMConfig

    model = dual_attention(CyberSLMConfig()).train()
    ids, targets = token_rows(rows, tokens)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(ids, targets)[1]

    return loss, list(model.parameters())


def token_rows(rows: int, tokens: int) -> tuple:
    import torch

    ids = torch.randint(4, 32_000, (rows, tokens + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


CONTENDERS = {
    "transformers Llama, compiled": Contender(partial(llama, compiled=True), tuned=False),
    "transformers Llama, compiled, tuned memory": Contender(partial(llama, compiled=True)),
    "transformers Llama, eager": Contender(partial(llama, compiled=False), tuned=False),
    "litgpt, eager": Contender(litgpt, tuned=False),
    "dual-attention, eager": Contender(reference, tuned=False),
    "cyberslm": Contender(cyberslm),
    "cyberslm, compile: true": Contender(partial(cyberslm, compiled=True)),
    "cyberslm, native: false, compile: true": Contender(partial(cyberslm, compiled=True, native=False)),
    "cyberslm, fp32": Contender(partial(cyberslm, bf16=False)),
}
PACKAGES = {"litgpt, eager": "litgpt", "dual-attention, eager": "dual_attention"}
"""What takes part only if it is installed."""


def measure(contender: Contender, rows: int, tokens: int) -> Figures:
    if contender.tuned:
        from cyberslm.training.process import prepare_for_training

        prepare_for_training()
    import torch

    loss, parameters = contender.make(rows, tokens)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step() -> None:
        loss().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    speed = rows * tokens / seconds(step, warm_up=2, repeats=5)
    return {"tokens/s": speed, "peak MiB": peak_mib()}


main(
    {
        f"33.5 M, {rows} x {tokens}, whole steps": Group(
            {
                name: partial(measure, contender, rows, tokens)
                for name, contender in CONTENDERS.items()
                if name not in PACKAGES or find_spec(PACKAGES[name]) is not None
            },
            unit="tokens/s",
        )
        for rows, tokens in SIZES
    },
    packages=("torch", "transformers"),
)
