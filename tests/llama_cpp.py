"""llama.cpp itself, through xllamacpp: ids, greedy continuations and log-probabilities of a GGUF file."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import xllamacpp


class LlamaCpp:
    """A server in this process on the loopback interface."""

    def __init__(self, path: Path, *, context: int = 64) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_batch, params.n_ubatch = context, context, context
        params.n_parallel, params.warmup, params.port = 1, False, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.verbosity = -1
        self.server = xllamacpp.Server(params)

    def _post(self, route: str, data: dict) -> dict:
        request = urllib.request.Request(
            self.server.listening_address + route, json.dumps(data).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def encode(self, text: str, *, special: bool = False, bos: bool = True) -> list[int]:
        return self._post("/tokenize", {"content": text, "add_special": bos, "parse_special": special})["tokens"]

    def complete(self, ids: list[int], count: int, *, alternatives: int = 0, ignore_eos: bool = False) -> dict:
        settings = {"prompt": ids, "n_predict": count, "temperature": 0.0, "return_tokens": True, "cache_prompt": False}
        settings["ignore_eos"] = ignore_eos
        return self._post("/completion", {**settings, "n_probs": alternatives, "samplers": ["temperature"]})
