"""An Ollama ``Modelfile`` beside a GGUF file: where it is, how far it sees, what ends an answer.

Ollama's templates are Go's, not Jinja: ChatML is written out, for a model without any template the prompt is passed on
as it is, and for others Ollama looks at the template in the file itself.
"""

from __future__ import annotations

from cyberslm.checkpoint.folder import ModelParts

_CHATML = """{{- if .System }}<|im_start|>system
{{ .System }}<|im_end|>
{{ end }}{{- range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
"""


def modelfile(file: str, parts: ModelParts) -> str:
    """The text of the file."""
    tokenizer, template = parts.tokenizer, parts.extras.chat_template
    lines = [f"FROM ./{file}", f"PARAMETER num_ctx {parts.config.max_seq_len}"]
    if template is None:
        lines.append('TEMPLATE "{{ .Prompt }}"')
    elif "<|im_start|>" in template and "<|im_end|>" in template:
        lines.append(f'TEMPLATE """{_CHATML}"""')
    stops = dict.fromkeys(tokenizer.piece(index) for index in (tokenizer.eos_id, *parts.extras.stop_ids))
    lines += [f'PARAMETER stop "{text}"' for text in stops if '"' not in text]
    return "\n".join(lines) + "\n"
