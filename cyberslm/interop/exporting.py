"""A model folder out to other tools: written, reopened by the importers, compared, and only then published.

Settings that a target has no word for are refused by name. What must hold of every export: the importer reads it, its
logits are the model's within what the rounding of weights explains, and its tokenizer gives the model's ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

import torch

from cyberslm import files
from cyberslm.checkpoint.folder import CHAT_TEMPLATE, EXPORT, GENERATION, WEIGHTS, ModelFolder, ModelParts
from cyberslm.checkpoint.hf import disk_name, generation_config, hf_config, misfit
from cyberslm.checkpoint.tensors import Kind, write_tensors
from cyberslm.errors import ConfigError, IntegrityError
from cyberslm.interop import gguf, hf
from cyberslm.interop.canonical import canonical
from cyberslm.interop.gguf_out import GgufType, write_gguf
from cyberslm.interop.modelfile import modelfile
from cyberslm.interop.source import Source, assembled, parameter_shapes
from cyberslm.text.hf import JSON_FILE

HfType = Literal["f32", "bf16", "f16"]
PROBES = (
    "The quick brown fox jumps over the lazy dog 0123456789 times.\n\n\tdef f(x): return x ** 2  # comment\r\n",
    "CVE-2024-3094 hxxps://example[.]com/a?b=%20c T1059.001 10.0.0.1 4d5a9000ff",
    "   \u6f22\u5b57\u304b\u306a \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \U0001f600\u200d na\u00efve  ",
    "",
)
# Of a weight, relative to the largest of its row: half a step of the type. 4 bits are cut off, not rounded, at one end.
ROUNDING = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 0.5 / 127 + 2**-10, "q4_0": 1 / 8 + 2**-10}
# Of the logits, relative to their spread; sums in another order count too.
TOLERANCES = {"f32": 1e-4, "f16": 2e-2, "bf16": 1e-1, "q8_0": 2e-1, "q4_0": 1.0}

_PROBE_TOKENS = 48
_TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


class Exported(NamedTuple):
    """What was published, and what a reader should know of it."""

    path: Path
    distance: float
    """Of the exported model's logits from the source's, relative to how far those spread."""
    notes: tuple[str, ...]


def export_hf(found: ModelFolder, target: Path, dtype: str, *, replace: bool = False) -> Exported:
    """Publish a folder that Hugging Face tools open. Raises `ConfigError` naming the setting they have no word for."""
    chosen = _chosen(dtype, get_args(HfType), "hf")
    parts = canonical(_parts(found), qwen2_words=found.tokenizer.cuts_like_qwen2)
    if (why := misfit(parts.config)) is not None:
        raise ConfigError(f"this model can't be a Hugging Face folder: {why}")

    def fill(staging: Path) -> list[str]:
        found.tokenizer.save(staging)
        if not (staging / JSON_FILE).exists():
            raise ConfigError(
                f"tokenizer: there is no tokenizer.json with equal ids ({'; '.join(found.tokenizer.losses)}), and"
                " transformers opens a tokenizer.model alone only with other libraries"
            )
        kind = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}[chosen]
        config = {key: value for key, value in hf_config(parts.config).items() if key != "cyberslm"}
        _write_json(staging / "config.json", {**config, "torch_dtype": kind, "dtype": kind})
        _write_json(staging / GENERATION, generation_config(parts.config, parts.extras.stop_ids))
        if parts.extras.chat_template is not None:
            (staging / CHAT_TEMPLATE).write_bytes(parts.extras.chat_template.encode())
        shapes = parameter_shapes(parts.config)
        kinds = {disk_name(name): Kind(_TORCH[chosen], shape) for name, shape in shapes.items()}
        own = {disk_name(name): name for name in shapes}
        write_tensors(staging / WEIGHTS, kinds, lambda name: parts.tensor(own[name]))
        return []

    return _publish(found, parts, target, _Format(chosen, fill, hf.read_source, replace))


def export_gguf(
    found: ModelFolder, target: Path, dtype: str, *, name: str = "model", replace: bool = False
) -> Exported:
    """Publish a folder with a GGUF file and an Ollama ``Modelfile``. Raises `ConfigError` as `export_hf` does."""
    chosen = cast(GgufType, _chosen(dtype, get_args(GgufType), "gguf"))
    parts = canonical(_parts(found), qwen2_words=True)
    file = f"model-{chosen}.gguf"

    def fill(staging: Path) -> list[str]:
        written = write_gguf(staging / file, parts, chosen, _about(found, name))
        (staging / "Modelfile").write_text(modelfile(file, parts), encoding="utf-8")
        return list(written.notes)

    return _publish(
        found, parts, target, _Format(chosen, fill, lambda staging: gguf.read_source(staging / file), replace)
    )


def _chosen(dtype: str, known: tuple[str, ...], target: str) -> str:
    if dtype not in known:
        raise ConfigError(f"--dtype {dtype!r:.40} is not known for --to {target}: {', '.join(known)} are")
    return dtype


def _parts(found: ModelFolder) -> ModelParts:
    weights = dict(found.model.named_parameters())
    return ModelParts(found.model.config, weights.__getitem__, found.tokenizer, found.extras)


def _about(found: ModelFolder, name: str) -> dict[str, str]:
    """Notes that travel inside the file: its name, the licence, and which model and tokenizer it was made of."""
    says = found.manifest.get("source", {}).get("says", {})
    kept = {f"general.{key}": str(value) for key, value in says.items() if key in ("license", "name", "organization")}
    marks = {"cyberslm.model": found.manifest["self"], "cyberslm.tokenizer_sha256": found.tokenizer.sha256}
    return {"general.name": name, **kept, **marks}


class _Format(NamedTuple):
    """How a folder is filled (returns notes) and opened again; ``replace`` one that is there."""

    dtype: str
    fill: Callable[[Path], list[str]]
    reopen: Callable[[Path], Source]
    replace: bool


def _publish(found: ModelFolder, parts: ModelParts, target: Path, form: _Format) -> Exported:
    """Nothing has the name ``target`` before what was written has been opened again and compared."""
    notes: list[str] = []
    measured: list[float] = []

    def fill(staging: Path) -> Mapping[str, object]:
        notes.extend(form.fill(staging))
        again = form.reopen(staging)
        _compare_words(found, again)
        _compare_weights(parts, again, form.dtype)
        measured.append(_compare_logits(found, again, form.dtype))
        return {
            "kind": EXPORT,
            "dtype": form.dtype,
            "of": {"manifest": found.manifest["self"], "tokenizer_sha256": found.tokenizer.sha256},
            "source": found.manifest.get("source", {}),
            "distance": measured[-1],
            "notes": list(notes),
        }

    files.require_space(target.absolute().parent, 4 * found.model.config.num_parameters, what="the export")
    files.publish(target, fill, replace=form.replace)
    return Exported(target, measured[-1], tuple(notes))


def _compare_words(found: ModelFolder, again: Source) -> None:
    for text in PROBES:
        if found.tokenizer.encode(text) != again.parts.tokenizer.encode(text):
            raise IntegrityError(f"the export's tokenizer gives other ids for {text[:40]!r}: it was not published")
    roles = ("pad_id", "bos_id", "eos_id", "add_bos", "control_ids")
    if wrong := [role for role in roles if getattr(found.tokenizer, role) != getattr(again.parts.tokenizer, role)]:
        raise IntegrityError(f"the export's tokenizer has another {wrong[0]}: it was not published")
    if found.extras != again.parts.extras:
        raise IntegrityError("the export has another chat template or other stop ids: it was not published")


def _compare_weights(parts: ModelParts, again: Source, dtype: str) -> None:
    """Each weight is the model's, rounded as asked."""
    for name in parameter_shapes(parts.config):
        wanted, given = (one.tensor(name).detach().float().cpu() for one in (parts, again.parts))
        allowed = ROUNDING[dtype] * wanted.abs().amax(-1, keepdim=True) + (0 if dtype == "f32" else 2**-24)
        if not bool(((given - wanted).abs() <= allowed).all()):
            raise IntegrityError(f"weight {name} of the export is not the model's in {dtype}: it was not published")


def _compare_logits(found: ModelFolder, again: Source, dtype: str) -> float:
    config = found.model.config
    length = min(_PROBE_TOKENS, config.max_seq_len)
    ids = torch.randint(0, config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = found.model(ids.to(found.model.device)).cpu()
        given = assembled(again.parts)(ids)
    spread = (wanted - wanted.mean()).norm().clamp(min=1e-9)
    distance = float((given - wanted).norm() / spread)
    if not distance <= TOLERANCES[dtype]:
        raise IntegrityError(
            f"the export's logits differ by {distance:.3g} of their spread from the model's, more than the"
            f" {TOLERANCES[dtype]} that {dtype} explains: it was not published"
        )
    return distance


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
