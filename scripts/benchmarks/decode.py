"""Greedy decoding of one model's weights by this package and by the peers that people would use instead.

A figure is tokens per second after a prompt of 32 tokens (``batch``), of the prompt (``prefill``), or seconds of a
whole process that makes one token (``first token``). Each contender also reports the peak memory of its process and, in
``batch``, the share of the limit that reading its weights once a step sets, by this machine's measured bandwidth.

llama.cpp takes part where the package llama-cpp-python is installed, which compiles it for the machine it is on;
wheels of it for any machine leave AVX-512 out. Its model file is written here, of the same weights.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from harness import Figures, Group, main, material, peak_mib, seconds
from peers import dual_attention

SHAPES: dict[str, dict[str, Any]] = {
    "33.5 M": {},
    "135 M": {
        "vocab_size": 49_152,
        "hidden_dim": 576,
        "num_layers": 30,
        "num_heads": 9,
        "num_kv_heads": 3,
        "ffn_hidden_dim": 1536,
    },
}
PROMPT, NEW, WARM_UP, CONTEXT = 32, 256, 8, 2048
LLAMA_TYPES = {"f32": "F32", "bf16": "BF16", "q8_0": "Q8_0"}
HAS_LLAMA = importlib.util.find_spec("llama_cpp") is not None

Step = Callable[[Any], Any]
"""Token ids ``(B,)`` in, the next ones out."""
Start = Callable[[Any], tuple[Any, Step]]
"""A prompt ``(B, T)`` in; the first new ids, and how to go on."""


class Made(NamedTuple):
    start: Start
    size: int
    """Bytes of its weights."""


Make = Callable[[], Made]


def network(shape: str) -> Any:
    from cyberslm.model.config import CyberSLMConfig
    from cyberslm.model.model import CyberSLM

    return CyberSLM(CyberSLMConfig(**{"max_seq_len": CONTEXT, **SHAPES[shape]})).eval()


def prompt_of(rows: int, length: int) -> Any:
    import torch

    return torch.randint(4, 32_000, (rows, length), generator=torch.Generator().manual_seed(0))


def cyberslm(shape: str, precision: str, fast: str) -> Made:
    from cyberslm.generation.config import DecodingConfig
    from cyberslm.generation.fast import prepare

    model = network(shape)
    prepare(model, DecodingConfig(precision=precision, fast=fast))  # type: ignore[arg-type]

    def start(ids: Any) -> tuple[Any, Step]:
        cache = model.new_cache(ids.shape[0], min(ids.shape[1] + NEW, CONTEXT))
        first = model.head(model.features(ids, cache=cache)[:, -1]).argmax(-1)
        return first, lambda tokens: model.next_logits(tokens, cache).argmax(-1)

    return Made(start, sum(t.numel() * t.element_size() for t in model.state_dict().values()))


def transformers(shape: str, dtype: str, cache_kind: str) -> Made:
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

    from cyberslm.checkpoint.hf import hf_config

    ours = network(shape)
    config = LlamaConfig(**{key: value for key, value in hf_config(ours.config).items() if key != "cyberslm"})
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").to(getattr(torch, dtype)).eval()
    model.load_state_dict({"model." + name: t for name, t in ours.state_dict().items()}, strict=False)
    static = cache_kind == "static"
    run = torch.compile(model, dynamic=False) if static else model

    def start(ids: Any) -> tuple[Any, Step]:
        cache = StaticCache(config=config, max_cache_len=PROMPT + NEW) if static else DynamicCache(config=config)
        first = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1)
        return first, lambda tokens: run(tokens[:, None], past_key_values=cache).logits[:, -1].argmax(-1)

    return Made(start, sum(p.numel() * p.element_size() for p in model.parameters()))


def llama(shape: str, kind: str) -> Made:
    """By the C interface; the largest logit is taken with numpy."""
    import ctypes

    import llama_cpp as lib
    import numpy as np

    path, vocabulary = material() / f"{shape}.{kind}.gguf", SHAPES[shape].get("vocab_size", 32_000)
    _LOG.append(lib.llama_log_callback(lambda *_: None))
    lib.llama_log_set(_LOG[0], ctypes.c_void_p(0))
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())

    def feed(context: Any, columns: Any, place: int) -> Any:
        rows, length = columns.shape
        batch = lib.llama_batch_init(rows * length, 0, 1)
        batch.n_tokens = rows * length
        for i, (row, column) in enumerate((row, column) for row in range(rows) for column in range(length)):
            batch.token[i], batch.pos[i] = int(columns[row, column]), place + column
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, row, column == length - 1
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        lib.llama_batch_free(batch)
        ends = range(length - 1, rows * length, length)
        return np.array(
            [np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (vocabulary,)).argmax() for i in ends]
        )

    def start(ids: Any) -> tuple[Any, Step]:
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = ids.shape[0] * (ids.shape[1] + NEW), ids.shape[0]
        params.n_batch, params.n_ubatch = max(CONTEXT, ids.numel()), 512
        params.n_threads = params.n_threads_batch = int(os.environ["OMP_NUM_THREADS"])
        context, places = lib.llama_init_from_model(model, params), itertools.count(ids.shape[1])
        return feed(context, ids.numpy(), 0), lambda tokens: feed(context, tokens[:, None], next(places))

    return Made(start, path.stat().st_size)


_LOG: list[Any] = []  # what C code calls has to stay alive


def reference(shape: str, dtype: str) -> Made:
    """dual-attention keeps no cache: each step is a pass over everything."""
    import torch

    model = dual_attention(network(shape).config).to(getattr(torch, dtype)).eval()

    def start(ids: Any) -> tuple[Any, Step]:
        held = ids

        def step(tokens: Any) -> Any:
            nonlocal held
            held = torch.cat((held, tokens[:, None]), dim=1)
            return model(held)[0][:, -1].argmax(-1)

        return model(ids)[0][:, -1].argmax(-1), step

    return Made(start, sum(p.numel() * p.element_size() for p in model.parameters()))


def decoding(make: Make, rows: int) -> Figures:
    import torch

    made = make()
    with torch.no_grad():
        tokens, step = made.start(prompt_of(rows, PROMPT))
        for _ in range(WARM_UP):
            tokens = step(tokens)
        start = time.perf_counter()
        for _ in range(NEW - WARM_UP - 1):
            tokens = step(tokens)
        rate = (NEW - WARM_UP - 1) / (time.perf_counter() - start)
    share = 100 * made.size * rate / _bandwidth(made.size)
    return {"tokens/s": rows * rate, "peak MiB": peak_mib(), "% of the bandwidth limit": share}


def answering(shape: str, precision: str, temperature: float, lookup: bool) -> Figures:  # noqa: FBT001
    """By the decoding loop. A random network's greedy text soon goes in circles; what is drawn from it never does."""
    import torch

    from cyberslm.decoding.draft import Speculation
    from cyberslm.decoding.loop import decode
    from cyberslm.decoding.request import Request
    from cyberslm.decoding.sampling import SamplingParams
    from cyberslm.generation.config import DecodingConfig
    from cyberslm.generation.fast import prepare

    model = network(shape)
    prepare(model, DecodingConfig(precision=precision, fast="on"))  # type: ignore[arg-type]
    prompt = prompt_of(1, PROMPT)[0].tolist()
    params = SamplingParams(max_new_tokens=NEW, temperature=temperature, seed=0)
    speculation = Speculation(lookup=True) if lookup else None
    with torch.no_grad():
        once = seconds(
            lambda: list(decode(model, [Request(prompt, params)], speculation=speculation)), warm_up=1, repeats=3
        )
    return {"tokens/s": NEW / once, "peak MiB": peak_mib()}


def prefill(make: Make, length: int) -> Figures:
    import torch

    made, ids = make(), prompt_of(1, length)
    with torch.no_grad():
        return {"tokens/s": length / seconds(lambda: made.start(ids), warm_up=1, repeats=5), "peak MiB": peak_mib()}


def _bandwidth(size: int) -> float:
    """Bytes per second of reading ``size`` bytes again and again, by all threads."""
    import torch

    numbers = torch.ones(size // 8, dtype=torch.float64)
    taken = []
    for _ in range(12):
        start = time.perf_counter()
        numbers.sum()
        taken.append(time.perf_counter() - start)
    return size / min(taken)


FIRST_TOKEN = {
    "cyberslm": "from cyberslm.__main__ import main; main()",
    "transformers": """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
with torch.no_grad():
    model(torch.arange(32)[None]).logits[:, -1].argmax()
""",
    "llama.cpp": """
import sys, llama_cpp
model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), llama_cpp.llama_model_default_params())
context = llama_cpp.llama_init_from_model(model, llama_cpp.llama_context_default_params())
tokens = (llama_cpp.llama_token * 32)(*range(32))
llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, 32))
llama_cpp.llama_get_logits(context)[0]
""",
    "dual-attention": """
import torch
from dual_attention.language_models import TransformerLM
model = TransformerLM(32000, 384, 12, 6, 1024, 0.0, "swiglu", True, 2048, "rmsnorm", False, "RoPE").eval()
with torch.no_grad():
    model(torch.arange(32)[None])[0][:, -1].argmax()
""",
}


def first_token(name: str, *arguments: str) -> Figures:
    taken, folder = [], str(material())
    command = [sys.executable, "-c", FIRST_TOKEN[name], *(a.replace("MATERIAL", folder) for a in arguments)]
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        taken.append(time.perf_counter() - start)
    return {"s": min(taken), "peak MiB": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024}


def in_chunks(shape: str, precision: str, chunk: int) -> Figures:
    """A prompt of 2,000 tokens, fed as the engine feeds it."""
    import torch

    from cyberslm.decoding.feed import prefill
    from cyberslm.generation.config import DecodingConfig
    from cyberslm.generation.fast import prepare

    model = network(shape)
    prepare(model, DecodingConfig(precision=precision, fast="on"))  # type: ignore[arg-type]
    prompt = prompt_of(1, 2000)[0].tolist()
    with torch.no_grad():
        taken = seconds(
            lambda: prefill(model, [prompt], model.new_cache(1, CONTEXT), chunk=chunk), warm_up=1, repeats=3
        )
    return {"tokens/s": len(prompt) / taken, "peak MiB": peak_mib()}


def contenders(shape: str) -> Iterator[tuple[str, Make]]:
    if HAS_LLAMA:
        yield from ((f"llama.cpp {kind}", partial(llama, shape, kind)) for kind in ("q8_0", "bf16", "f32"))
    yield from ((f"cyberslm {p}", partial(cyberslm, shape, p, "on")) for p in ("int8", "int4", "bf16", "fp32"))
    yield "cyberslm fp32, fast: off", partial(cyberslm, shape, "fp32", "off")
    yield from ((f"transformers {t}", partial(transformers, shape, t, "dynamic")) for t in ("bfloat16", "float32"))


def groups() -> Iterator[tuple[str, Group]]:
    for shape in SHAPES:
        makes = dict(contenders(shape))
        one = makes | {
            "transformers bfloat16, static and compiled": partial(transformers, shape, "bfloat16", "static"),
            "dual-attention float32": partial(reference, shape, "float32"),
        }
        for rows in (1, 8, 32):
            those = one if rows == 1 else makes
            yield (
                f"{shape}, batch {rows}",
                Group({name: partial(decoding, make, rows) for name, make in those.items()}, unit="tokens/s"),
            )
        for length in (512, 2048):
            yield (
                f"{shape}, prefill {length:,}",
                Group({name: partial(prefill, make, length) for name, make in makes.items()}, unit="tokens/s"),
            )
        chunks = {
            f"cyberslm {p}, {c:,}": partial(in_chunks, shape, p, c) for p in ("int8", "bf16") for c in (512, 2048)
        }
        yield f"{shape}, prompt in chunks", Group(chunks, unit="tokens/s")
        for precision in ("int8", "fp32"):
            ways = {
                f"{kind}, {'lookup' if lookup else 'token by token'}": partial(
                    answering, shape, precision, temperature, lookup
                )
                for kind, temperature in (("greedy", 0.0), ("drawn", 1.0))
                for lookup in (False, True)
            }
            yield f"{shape}, whole answers, {precision}", Group(ways, unit="tokens/s")
    arguments = ("generate", "MATERIAL/model", "--prompt", "a b c d e f g h", "--max-new-tokens", "1")
    first = {
        "dual-attention": partial(first_token, "dual-attention"),
        "cyberslm": partial(first_token, "cyberslm", *arguments),
        "transformers": partial(first_token, "transformers", "MATERIAL/model"),
    }
    if HAS_LLAMA:
        first["llama.cpp f32"] = partial(first_token, "llama.cpp", "MATERIAL/33.5 M.f32.gguf")
    yield "first token", Group(first, unit="s")


def write_material(folder: Path) -> str:
    """Model files of llama.cpp, and a model folder with a tokenizer of its own."""
    for shape in SHAPES:
        model = network(shape)
        for kind in LLAMA_TYPES if HAS_LLAMA else ():
            write_gguf(folder / f"{shape}.{kind}.gguf", kind, model)
    write_folder(folder)
    return "" if HAS_LLAMA else "llama-cpp-python is not installed: llama.cpp takes no part"


def write_folder(folder: Path) -> None:
    from cyberslm.checkpoint.folder import save_model
    from cyberslm.text.config import TokenizerConfig
    from cyberslm.text.train import train_tokenizer

    words = [f"word{i} and {i * 7919 % 1000:03d}, then {i % 13}." for i in range(4000)]
    tokenizer = train_tokenizer(words, TokenizerConfig(vocab_size=300)).tokenizer
    save_model(folder / "model", network("33.5 M"), tokenizer, {})


def write_gguf(path: Path, kind: str, model: Any) -> None:
    """The weights in llama.cpp's format, without a vocabulary."""
    import gguf

    from cyberslm.model.rope import interleave

    config, dtype = model.config, gguf.GGMLQuantizationType[LLAMA_TYPES[kind]]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.hidden_dim)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.ffn_hidden_dim)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    heads = {"q_proj": config.num_heads, "k_proj": config.kv_heads}
    for name, parameter in model.named_parameters():
        turned = heads.get(name.split(".")[-2])
        array = (parameter if turned is None else interleave(parameter, turned)).detach().contiguous().numpy()
        if array.ndim == 2 and kind != "f32":
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, dtype), raw_dtype=dtype)
        else:
            writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    names = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    parts = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    parts |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    parts |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    pieces = name.split(".")
    if pieces[0] == "layers":
        return f"blk.{pieces[1]}.{parts[pieces[-2]]}.weight"
    return f"{names[pieces[0]]}.weight"


if __name__ == "__main__":
    main(dict(groups()), packages=("torch", "transformers"), make_material=write_material)
