"""The settings of cleaning: a list of named steps, run in their order.

    steps:
      - length: {min_characters: 40}
      - boilerplate: {}
      - near_duplicates: {threshold: 0.8}

Each entry names one step. Nothing here changes characters unless it is asked to: look-alike letters and invisible marks
are evidence in this domain, and the ``tripwires`` step counts them instead.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from cyberslm.config import PathStr
from cyberslm.errors import ConfigError

MAX_SHINGLE_WORDS = 16
MAX_PERMUTATIONS = 1024
MAX_WINDOW = 1000
CORPUS_WIDE = frozenset({"boilerplate", "exact_duplicates", "near_duplicates"})

Tripwire = Literal[
    "bidi control", "invisible character", "hidden tag text", "mixed alphabets", "instruction to a model"
]
TRIPWIRES: tuple[Tripwire, ...] = (
    "bidi control",
    "invisible character",
    "hidden tag text",
    "mixed alphabets",
    "instruction to a model",
)


@dataclass(frozen=True, kw_only=True)
class TripwiresConfig:
    """Count text that may be meant to deceive a reader or a model; the text stays as it is."""

    drop: tuple[Tripwire, ...] = ()
    """Kinds that lead to a document being left out; by default none, they are only counted and shown."""


@dataclass(frozen=True, kw_only=True)
class UnicodeConfig:
    """Mend or normalise characters; with the defaults it changes nothing."""

    mend: bool = False
    """Undo text that was decoded with the wrong encoding, with ftfy (extra `data`)."""
    normalize: Literal["none", "NFC", "NFKC"] = "none"
    """Unicode normal form; NFKC also folds look-alikes such as full-width letters, which may be evidence."""


@dataclass(frozen=True, kw_only=True)
class LengthConfig:
    """Leave out documents that are very short or very long."""

    min_characters: int = 20
    """Fewest characters of a document, white space around it not counted."""
    max_characters: int | None = None
    """Most characters of a document; null sets no limit."""

    def __post_init__(self) -> None:
        _at_least("min_characters", self.min_characters, 0)
        if self.max_characters is not None:
            _at_least("max_characters", self.max_characters, max(1, self.min_characters))


@dataclass(frozen=True, kw_only=True)
class QualityConfig:
    """Leave out text that is no language, log, code or table; judged by the first 2**20 characters."""

    min_alphanumeric: float = 0.2
    """Smallest share of letters and digits among the characters that are not white space."""
    max_undecodable: float = 0.05
    """Largest share of control characters and of U+FFFD."""
    max_wall: float = 0.5
    """Largest share of characters in walls: words of 40 that look random, such as base64, or of 300 of any kind."""
    max_mean_word: float = 150.0
    """Longest mean length of words; scripts without spaces are not judged by it."""
    max_run: float = 0.5
    """Largest share of one character repeated in one run, white space not counted; texts under 200 are not judged."""
    max_repeated_lines: float = 0.9
    """Largest share of characters in lines that stood before in the document; under 20 lines it is not judged."""
    max_repeated_words: float = 0.95
    """Largest share of runs of 5 words that stood before in the document; under 100 words it is not judged."""
    max_keyboard: float = 0.35
    """Largest share of different lower-case Latin words with 4 consonants in a row; under 20 it is not judged."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "max_mean_word":
                if value < 1:
                    raise ConfigError(f"max_mean_word: {value} is below 1")
            elif not 0 <= value <= 1:
                raise ConfigError(f"{field.name}: {value} is a share and must be 0 to 1")


@dataclass(frozen=True, kw_only=True)
class BoilerplateConfig:
    """Cut lines that many documents of a source share, such as headers, footers and licence banners."""

    max_share: float = 0.3
    """Largest share of a source's documents that a line may stand in and stay."""
    min_documents: int = 20
    """Fewest documents of a source for which lines are counted at all."""
    min_characters: int = 20
    """Shortest line that is cut, white space around it not counted."""
    edge_lines: int = 64
    """Lines counted at the beginning and at the end of each document; a line found there is cut everywhere."""
    action: Literal["cut", "report"] = "cut"
    """Whether the lines are cut or only reported."""

    def __post_init__(self) -> None:
        if not 0 < self.max_share < 1:
            raise ConfigError(f"max_share: {self.max_share} must be above 0 and below 1, such as 0.3")
        _at_least("min_documents", self.min_documents, 2)
        _at_least("min_characters", self.min_characters, 1)
        _within("edge_lines", self.edge_lines, 1, 10_000)


@dataclass(frozen=True, kw_only=True)
class ExactDuplicatesConfig:
    """Leave out equal documents or paragraphs; the first by source, file and line is kept."""

    level: Literal["document", "paragraph"] = "document"
    """What is compared: documents, or the blocks between blank lines."""
    fold_case: bool = False
    """Treat capital and small letters as equal."""
    fold_space: bool = False
    """Treat any run of white space as one space; white space around a text never counts."""
    min_characters: int = 200
    """Shortest paragraph that is compared; documents are compared whatever their length."""
    action: Literal["drop", "report"] = "drop"
    """Whether copies are left out or only reported."""

    def __post_init__(self) -> None:
        _at_least("min_characters", self.min_characters, 1)


@dataclass(frozen=True, kw_only=True)
class NearDuplicatesConfig:
    """Leave out documents or paragraphs that are almost equal; equal ones are found as well."""

    level: Literal["document", "paragraph"] = "document"
    """What is compared: documents, or the blocks between blank lines."""
    threshold: float = 0.6
    """Smallest share of common shingles (Jaccard) of near copies; 0.6 finds texts with 5 % of the words changed."""
    shingle_words: int = 3
    """Words in a row that make a shingle."""
    permutations: int = 128
    """MinHash values of a text; more find pairs near the threshold more surely and cost time in proportion."""
    min_words: int = 20
    """Fewest words to compare by; shorter documents are copies only when equal, shorter paragraphs are left alone."""
    identifiers: Literal["distinct", "ignore"] = "distinct"
    """Whether texts of one template that name other things (a CVE, a product, a version) are kept apart."""
    action: Literal["drop", "report"] = "drop"
    """Whether copies are left out or only reported; either way they fall on one side of the validation split."""

    def __post_init__(self) -> None:
        if not 0.3 <= self.threshold <= 1:
            raise ConfigError(f"threshold: {self.threshold} is outside 0.3 to 1")
        _within("shingle_words", self.shingle_words, 1, MAX_SHINGLE_WORDS)
        _within("permutations", self.permutations, 16, MAX_PERMUTATIONS)
        _at_least("min_words", self.min_words, 1)


@dataclass(frozen=True, kw_only=True)
class ContaminationConfig:
    """Leave out or cut what the evaluation texts also hold; case, punctuation and white space don't count."""

    against: tuple[PathStr, ...] = ()
    """Files or folders of evaluation text, read like sources."""
    unit: Literal["words", "characters"] = "words"
    """What a run is counted in; characters are letters and digits only, for scripts without spaces."""
    length: int | None = None
    """Length of a run that counts as found; null takes 13 words or 50 characters."""
    min_length: int | None = None
    """Shortest evaluation text that is looked for as a whole; null takes 8 words or 30 characters."""
    max_share: float = 0.0
    """Largest share of a document that may be found without anything being done."""
    action: Literal["drop", "cut", "report"] = "drop"
    """Whether such a document is left out, freed of what was found, or only reported."""

    def __post_init__(self) -> None:
        if not self.against:
            raise ConfigError("against: is empty; name the evaluation files")
        if not 0 <= self.max_share < 1:
            raise ConfigError(f"max_share: {self.max_share} must be at least 0 and below 1")
        _within("length", self.run_length, 1, MAX_WINDOW)
        _within("min_length", self.shortest, 1, self.run_length)

    @property
    def run_length(self) -> int:
        return self.length if self.length is not None else {"words": 13, "characters": 50}[self.unit]

    @property
    def shortest(self) -> int:
        default = min(self.run_length, {"words": 8, "characters": 30}[self.unit])
        return self.min_length if self.min_length is not None else default


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """One cleaning step; exactly one of the keys is given."""

    tripwires: TripwiresConfig | None = None
    """Count hidden and misleading text, and instructions to a model."""
    unicode: UnicodeConfig | None = None
    """Mend or normalise characters."""
    length: LengthConfig | None = None
    """Leave out short or long documents."""
    quality: QualityConfig | None = None
    """Leave out junk."""
    boilerplate: BoilerplateConfig | None = None
    """Cut lines that many documents share."""
    exact_duplicates: ExactDuplicatesConfig | None = None
    """Leave out copies."""
    near_duplicates: NearDuplicatesConfig | None = None
    """Leave out near copies."""
    contamination: ContaminationConfig | None = None
    """Leave out what evaluation files hold."""

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) != 1:
            known = ", ".join(field.name for field in fields(self))
            what = f"{' and '.join(given)} in one entry" if given else "an entry without a step"
            raise ConfigError(f"{what}; write one step an entry, such as `- length: {{}}`; known: {known}")

    @property
    def name(self) -> str:
        return next(field.name for field in fields(self) if getattr(self, field.name) is not None)

    @property
    def changes_texts(self) -> bool:
        """Whether it may change a text that it leaves in."""
        if self.unicode is not None:
            return self.unicode.mend or self.unicode.normalize != "none"
        if self.contamination is not None:
            return self.contamination.action == "cut"
        copies = self.exact_duplicates or self.near_duplicates
        return self.boilerplate is not None or (copies is not None and copies.level == "paragraph")

    @property
    def groups_texts(self) -> bool:
        """Whether it tells which documents are copies and so belong on one side of the split."""
        copies = self.exact_duplicates or self.near_duplicates
        return copies is not None and copies.level == "document"

    @property
    def settings(self) -> Any:
        return getattr(self, self.name)

    @property
    def corpus_wide(self) -> bool:
        """Whether the step must see every document before it can judge one."""
        return self.name in CORPUS_WIDE


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name}: {value} is below {low}")


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name}: {value} is outside {low} to {high:,}")
