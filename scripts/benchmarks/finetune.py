"""LoRA fine-tuning of the SmolLM2-135M shape at 512 tokens against transformers + PEFT + Trainer.

Same shape (random weights, a speed doesn't depend on them), rank and targets, rows, AdamW (fused) and clipping to norm
1, bf16 autocast. A figure is tokens per second of whole steps after two to warm up; each contender also reports the
peak memory of its process. The peer runs as its documents say, eager and with torch_compile, as installed and with the
memory settings that `cyberslm finetune` makes for itself. Ours are the parts that a run is made of.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from harness import Figures, Group, main, peak_mib, seconds

ROWS, TOKENS, WARM_UP, REPEATS = 8, 512, 2, 3
RANK, ALPHA, RATE = 16, 32, 1e-4


def shape() -> Any:
    from cyberslm.model.config import CyberSLMConfig

    return CyberSLMConfig(
        vocab_size=49_152,
        hidden_dim=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        ffn_hidden_dim=1536,
        max_seq_len=8192,
        rope_base=100_000.0,
    )


def token_rows() -> Any:
    import torch

    return torch.randint(4, 49_152, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(0))


def cyberslm(*, compiled: bool = False, native: bool = True, precision: str = "bf16") -> float:
    from cyberslm.training.process import prepare_for_training

    prepare_for_training()
    import torch

    from cyberslm.data.loader import Batch
    from cyberslm.model.lora import LoraConfig, add_adapters, keep_base_in
    from cyberslm.model.model import CyberSLM
    from cyberslm.native.build import library
    from cyberslm.training.compiled import compile_and_try
    from cyberslm.training.loss import next_token_loss
    from cyberslm.training.optim import OptimizerConfig, build_optimizer

    model, ids = CyberSLM(shape()).train(), token_rows()
    add_adapters(model, LoraConfig(rank=RANK, alpha=ALPHA))
    if precision == "bf16":
        keep_base_in(model, torch.bfloat16)
    if native:
        library()
    model.use_native(on=native)
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    cast = partial(torch.autocast, "cpu", dtype=torch.bfloat16, enabled=precision == "bf16")
    if compiled and (reason := compile_and_try(model, next_token_loss, batch, cast)) is not None:
        raise RuntimeError(reason)
    optimizer = build_optimizer(model, OptimizerConfig(lr=RATE, weight_decay=0.0))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> None:
        with cast():
            output = next_token_loss(model, batch)
        (output.objective / output.num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return ROWS * TOKENS / seconds(step, warm_up=WARM_UP, repeats=REPEATS)


def trainer(*, compiled: bool, tuned: bool) -> float:
    if tuned:
        from cyberslm.training.process import prepare_for_training

        prepare_for_training()
    import tempfile

    import peft
    import transformers

    from cyberslm.checkpoint.hf import hf_config
    from cyberslm.model.lora import TARGETS

    settings = {key: value for key, value in hf_config(shape()).items() if key != "cyberslm"}
    config = transformers.LlamaConfig(**settings)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    rows = [{"input_ids": row[:-1], "labels": row[:-1]} for row in token_rows()] * (WARM_UP + REPEATS)
    ends: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=ROWS,
            max_steps=WARM_UP + REPEATS,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            max_grad_norm=1.0,
            bf16=True,
            use_cpu=True,
            torch_compile=compiled,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
        )
        transformers.Trainer(
            peft.get_peft_model(model, lora), arguments, train_dataset=rows, callbacks=[Clock()]
        ).train()
    taken = sorted(late - early for early, late in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False))
    return ROWS * TOKENS / taken[len(taken) // 2]


CONTENDERS: dict[str, Callable[[], float]] = {
    "transformers + PEFT + Trainer, eager": partial(trainer, compiled=False, tuned=False),
    "transformers + PEFT + Trainer, eager, tuned memory": partial(trainer, compiled=False, tuned=True),
    "transformers + PEFT + Trainer, compiled": partial(trainer, compiled=True, tuned=False),
    "transformers + PEFT + Trainer, compiled, tuned memory": partial(trainer, compiled=True, tuned=True),
    "cyberslm": cyberslm,
    "cyberslm, compile: true": partial(cyberslm, compiled=True),
    "cyberslm, native: false, compile: true": partial(cyberslm, compiled=True, native=False),
    "cyberslm, fp32": partial(cyberslm, precision="fp32"),
}


def measure(work: Callable[[], float]) -> Figures:
    speed = work()
    return {"tokens/s": speed, "peak MiB": peak_mib()}


main(
    {
        f"SmolLM2-135M, LoRA rank {RANK}, {ROWS} x {TOKENS}, whole steps": Group(
            {name: partial(measure, work) for name, work in CONTENDERS.items()}, unit="tokens/s"
        )
    },
    packages=("torch", "transformers", "peft", "accelerate"),
)
