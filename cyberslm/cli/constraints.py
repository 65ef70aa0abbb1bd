"""Options that bind an answer's form and its identifiers, and what they ask of each prompt's answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from cyberslm.errors import GenerationError

if TYPE_CHECKING:
    from cyberslm.generation.constrain import Constraint
    from cyberslm.generation.demand import Demand

MAX_FILE_BYTES = 16 << 20

JsonSchema = Annotated[Path | None, typer.Option(metavar="FILE", help="Answer with JSON of this JSON schema.")]
Regex = Annotated[str | None, typer.Option(help="Answer with text that this regular expression matches wholly.")]
Choice = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Answer with one of these; repeat for each.")]
Grammar = Annotated[Path | None, typer.Option(metavar="FILE", help="Answer with text of this Lark grammar.")]
PresetName = Annotated[
    str | None,
    typer.Option("--preset", metavar="NAME", help="cvss31, cvss40, stix-indicator, sigma, verdict, attack or cwe."),
]
PresetIds = Annotated[
    Path | None, typer.Option("--preset-ids", metavar="FILE", help="Any text that names what the preset may choose.")
]
PresetOptional = Annotated[
    bool, typer.Option("--preset-optional", help="Let the preset's optional metrics, fields and sections come too.")
]
Ground = Annotated[bool, typer.Option("--ground", help="Copy identifiers from the prompt, never invent one.")]
GroundKinds = Annotated[
    list[str] | None,
    typer.Option("--ground-kind", metavar="KIND", help="Only this kind: cve, ipv4, ipv6, domain, hash, email or url."),
]
Allow = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Identifiers that may be written too, one a line; with --ground.")
]


class FormOptions(NamedTuple):
    """What was given of them."""

    json_schema: Path | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: Path | None = None
    preset: str | None = None
    preset_ids: Path | None = None
    preset_optional: bool = False
    ground: bool = False
    ground_kinds: list[str] | None = None
    allow: Path | None = None

    def demands(self, prompts: list[str]) -> list[Demand]:
        """What is asked of each prompt's answer. Raises `GenerationError` for what contradicts itself or can't be read.

        A grounded STIX indicator whose identifiers weren't given chooses among those of its prompt and the allow-list.
        """
        self._check()
        if self == FormOptions():
            from cyberslm.generation.demand import NOTHING

            return [NOTHING] * len(prompts)
        from cyberslm.generation.demand import Demand
        from cyberslm.generation.grounding import Grounding
        from cyberslm.generation.identifiers import KINDS

        ground = None
        if self.ground or self.ground_kinds:
            allow = _read(self.allow, "--allow").split("\n") if self.allow is not None else []
            ground = Grounding(
                kinds=tuple(self.ground_kinds or KINDS), allow=tuple(line.strip() for line in allow if line.strip())
            )
        if self.preset == "stix-indicator" and ground is not None and self.preset_ids is None:
            return [Demand(self._preset("\n".join([prompt, *ground.allow])), ground) for prompt in prompts]
        return [Demand(self._constraint(), ground)] * len(prompts)

    def _check(self) -> None:
        given = [name for name in ("json_schema", "regex", "choice", "grammar", "preset") if getattr(self, name)]
        if len(given) > 1:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise GenerationError(f"{names} each bind the whole answer: give one of them")
        if self.preset is None and (self.preset_ids is not None or self.preset_optional):
            raise GenerationError("--preset-ids and --preset-optional go with --preset NAME")
        if self.allow is not None and not self.ground and not self.ground_kinds:
            raise GenerationError("--allow goes with --ground")

    def _constraint(self) -> Constraint | None:
        from cyberslm.generation.constrain import Constraint

        if self.preset is not None:
            return self._preset("" if self.preset_ids is None else _read(self.preset_ids, "--preset-ids"))
        if self.json_schema is not None:
            return Constraint.json_schema(_read(self.json_schema, "--json-schema"))
        if self.grammar is not None:
            return Constraint.grammar(_read(self.grammar, "--grammar"))
        if self.choice:
            return Constraint.choice(self.choice)
        return None if self.regex is None else Constraint.regex(self.regex)

    def _preset(self, ids: str) -> Constraint:
        from cyberslm.generation.presets import PRESETS, preset

        name = self.preset or ""
        if self.preset_ids is None and name in PRESETS and PRESETS[name].needs_ids:
            raise GenerationError(f"--preset {name} needs --preset-ids FILE, any text that names what it may choose")
        try:
            return preset(name, ids=ids, optional=self.preset_optional)
        except GenerationError as error:
            where = "" if self.preset_ids is None else f" (--preset-ids {self.preset_ids})"
            raise GenerationError(f"{error}{where}") from error


def _read(path: Path, option: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise GenerationError(f"{option} {path} can't be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise GenerationError(f"{option} {path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise GenerationError(f"{option} {path} is not UTF-8 text: {error}") from error
