"""The way of text into rows: reading, redaction, near-duplicates, tokens against the raw SentencePiece encoder, rows.

The text is made here: Python's own library and its language reference (code and prose), advisories of one template,
logs, and prose of made-up words. A figure is that of one stage alone; MB are 10^6 bytes of UTF-8 text.
"""

from __future__ import annotations

import json
import random
import re
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from harness import Group, main, material, seconds

from cyberslm.data.clean.config import NearDuplicatesConfig, StepConfig
from cyberslm.data.clean.entry import Entry
from cyberslm.data.clean.pipeline import Pipeline
from cyberslm.data.config import DataConfig
from cyberslm.data.counts import Counts
from cyberslm.data.inputs import find_inputs
from cyberslm.data.loader import RowLoader
from cyberslm.data.prepare import BATCH_CHARACTERS, open_prepared, prepare
from cyberslm.data.redact.config import RedactConfig
from cyberslm.data.redact.redactor import Redactor
from cyberslm.data.sources import read_documents
from cyberslm.text.config import TokenizerConfig
from cyberslm.text.spm import SentencePieceTokenizer
from cyberslm.text.train import train_tokenizer

MB = 1_000_000
TEXT_BYTES = 20 * MB
LIBRARY_BYTES = 8 * MB
ROWS, TOKENS = 8, 1024
VOCAB = 16_384
SYLLABLES = re.findall("..", "kaloremitusanodevibepofugiraselamo")
FLAWS = ["a buffer overflow", "path traversal", "a use after free", "an authentication bypass", "SQL injection"]
ADVISORY = (
    "Security advisory {cve}\n\nThe maintainers have been told about {flaw} in {product}. Versions before {version} are"
    " affected. A remote attacker who reaches the service at {ip} may run code with its rights, read what belongs to"
    " other users, or make it unavailable.\n\nThere is no known way around the problem. All users are asked to install"
    " the update, to restart the service, and to look in the logs of the last weeks for requests that were refused or"
    " ended in an error.\n\nWrite to {mail} with questions about {cve}; {rest}\n"
)


def library_texts() -> Iterator[str]:
    """Python's language reference and the source of its library, in a fixed order."""
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
        if "site-packages" not in path.parts:
            yield path.read_text(encoding="utf-8", errors="replace")


def prose(rng: random.Random, words: Sequence[str], length: int) -> str:
    chosen = [words[int(len(words) * rng.random() ** 2.5)] for _ in range(length)]
    lines = (" ".join(chosen[at : at + 12]).capitalize() + "." for at in range(0, length, 12))
    return "\n".join(lines)


def advisory(rng: random.Random, words: Sequence[str]) -> str:
    product = f"{rng.choice(words)} {rng.choice(words)}".title()
    return ADVISORY.format(
        cve=f"CVE-{rng.randint(2015, 2026)}-{rng.randint(1000, 99999)}",
        flaw=rng.choice(FLAWS),
        product=product,
        version=f"{rng.randint(1, 9)}.{rng.randint(0, 20)}.{rng.randint(0, 20)}",
        ip=f"10.{rng.randint(0, 255)}.{rng.randint(0, 255)}.{rng.randint(1, 254)}",
        mail=f"{rng.choice(words)}@{rng.choice(words)}.example",
        rest=prose(rng, words, 30),
    )


def log(rng: random.Random, words: Sequence[str]) -> str:
    return "".join(
        f"Nov {rng.randint(1, 30):2} {rng.randint(0, 23):02}:{rng.randint(0, 59):02}:{rng.randint(0, 59):02}"
        f" gate{rng.randint(1, 9)} sshd[{rng.randint(300, 40000)}]: Failed password for {rng.choice(words)} from"
        f" 192.168.{rng.randint(0, 9)}.{rng.randint(1, 254)} port {rng.randint(1024, 65535)} ssh2\n"
        for _ in range(60)
    )


def with_changes(rng: random.Random, words: Sequence[str], text: str) -> str:
    """A near copy: one word in thirty is another."""
    parts = text.split(" ")
    for at in rng.sample(range(len(parts)), len(parts) // 30):
        parts[at] = rng.choice(words)
    return " ".join(parts)


def documents() -> Iterator[str]:
    """About ``TEXT_BYTES`` of text: library, then a mix of prose, its near copies, advisories and logs."""
    rng = random.Random(4)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(4000)]
    size = 0
    for text in library_texts():
        if size + len(text.encode()) > LIBRARY_BYTES:
            break
        size += len(text.encode())
        yield text
    recent: list[str] = []
    while size < TEXT_BYTES:
        kind = rng.random()
        if kind < 0.5:
            text = advisory(rng, words)
        elif kind < 0.6:
            text = log(rng, words)
        elif kind < 0.7 and recent:
            text = with_changes(rng, words, rng.choice(recent))
        else:
            text = prose(rng, words, rng.randint(50, 800))
            recent = [*recent[-200:], text]
        size += len(text.encode())
        yield text


def make_material(folder: Path) -> str:
    """Files of both formats, a tokenizer and prepared data; returns what they are, for people."""
    texts = list(documents())
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    random.Random(5).shuffle(lines)
    (folder / "text.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "txt").mkdir()
    for number, text in enumerate(texts):
        (folder / "txt" / f"{number:06d}.txt").write_text(text, encoding="utf-8")
    tokenizer = train_tokenizer(texts, TokenizerConfig(vocab_size=VOCAB, max_train_bytes=8 * MB)).tokenizer
    tokenizer.save(folder / "tokenizer")
    config = DataConfig(sources=(str(folder / "text.jsonl"),))
    prepared = prepare(config, lambda _: tokenizer, folder / "prepared", tokenizer_settings={})
    return f"{len(texts):,} documents, {size_of(texts) / MB:.1f} MB; {prepared.train.num_tokens:,} training tokens"


def size_of(texts: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def texts() -> list[str]:
    with (material() / "text.jsonl").open(encoding="utf-8") as stream:
        return [json.loads(line)["text"] for line in stream]


def batches() -> list[list[str]]:
    """The texts as ``data prepare`` hands them to the tokenizer."""
    made: list[list[str]] = [[]]
    size = 0
    for text in texts():
        if size >= BATCH_CHARACTERS:
            made.append([])
            size = 0
        made[-1].append(text)
        size += len(text)
    return made


def rate(size: int, taken: float) -> float:
    return size / MB / taken


def sentencepiece(threads: int) -> float:
    """The library's own encoder, asked for lists of ids as its documentation shows."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(material() / "tokenizer" / "tokenizer.model"))
    parts = batches()

    def encode() -> None:
        for part in parts:
            processor.encode(part, out_type=int, num_threads=threads)

    processor.encode(parts[0], out_type=int, num_threads=threads)
    return rate(sum(map(size_of, parts)), seconds(encode, warm_up=0, repeats=1))


def tokens(threads: int) -> float:
    tokenizer = SentencePieceTokenizer.from_file(material() / "tokenizer")
    parts = batches()

    def encode() -> None:
        for part in parts:
            tokenizer.encode_documents(part, num_threads=threads)

    tokenizer.encode_documents(parts[0], num_threads=threads)
    return rate(sum(map(size_of, parts)), seconds(encode, warm_up=0, repeats=1))


def reading(name: str) -> float:
    config = DataConfig(sources=(str(material() / name),))
    files = find_inputs(config.sources, key="data.sources").files

    def read() -> None:
        for file in files:
            for _ in read_documents(file, config, Counts()):
                pass

    return rate(size_of(texts()), seconds(read, warm_up=1, repeats=3))


def redaction() -> float:
    redactor, found = Redactor(RedactConfig(), bytes(32)), texts()[::4]

    def redact() -> None:
        for text in found:
            redactor.redact(text)

    return rate(size_of(found), seconds(redact, warm_up=0, repeats=1))


def near_duplicates(workers: int) -> float:
    """MB a minute of both passes."""
    entries = [Entry(text, "data.sources[0]", "text.jsonl", line + 1, record=True) for line, text in enumerate(texts())]

    def find() -> None:
        with tempfile.TemporaryDirectory() as scratch:
            pipeline = Pipeline([StepConfig(near_duplicates=NearDuplicatesConfig())], scratch=Path(scratch))
            pipeline.survey(lambda: entries, workers=workers)
            for _ in pipeline.run(lambda: entries, workers=workers):
                pass

    return 60 * rate(size_of([entry.text for entry in entries]), seconds(find, warm_up=0, repeats=1))


def opening() -> float:
    return 1000 * seconds(lambda: open_prepared(material() / "prepared"), warm_up=0, repeats=1)


def rows() -> float:
    prepared = open_prepared(material() / "prepared")
    tokenizer = prepared.tokenizer
    loader = RowLoader(
        prepared.train, seq_len=TOKENS, batch_rows=ROWS, seed=1, pad_id=tokenizer.pad_id, bos_id=tokenizer.bos_id
    )
    steps = iter(range(1_000_000))
    return 1000 * seconds(lambda: loader.batch(next(steps)), warm_up=3, repeats=50)


def training_step() -> float:
    """Forward, backward and update of the demo's model, with rows of ``TOKENS``."""
    import torch

    from cyberslm.model.config import CyberSLMConfig
    from cyberslm.model.model import CyberSLM
    from cyberslm.training.loss import next_token_loss

    prepared = open_prepared(material() / "prepared")
    loader = RowLoader(prepared.train, seq_len=TOKENS, batch_rows=ROWS, seed=1, pad_id=prepared.tokenizer.pad_id)
    config = CyberSLMConfig(
        vocab_size=4096, hidden_dim=192, num_layers=4, num_heads=3, ffn_hidden_dim=512, max_seq_len=TOKENS
    )
    model = CyberSLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = loader.batch(0)
    batch = batch._replace(input_ids=batch.input_ids % 4096, targets=batch.targets.clamp(max=4095))

    def step() -> None:
        next_token_loss(model, batch).objective.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return 1000 * seconds(step, warm_up=1, repeats=3)


if __name__ == "__main__":  # worker processes import this file
    main(
        {
            "tokens": Group(
                {
                    "SentencePiece, 1 thread": partial(sentencepiece, 1),
                    "cyberslm, 1 thread": partial(tokens, 1),
                    "SentencePiece, 2 threads": partial(sentencepiece, 2),
                    "cyberslm, 2 threads": partial(tokens, 2),
                },
                unit="MB/s",
            ),
            "reading, 1 process": Group(
                {"JSON lines": partial(reading, "text.jsonl"), "a text file a document": partial(reading, "txt")},
                unit="MB/s",
            ),
            "redaction, 1 process": Group({"all classes": redaction}, unit="MB/s"),
            "near-duplicates": Group(
                {"1 worker": partial(near_duplicates, 1), "2 workers, with starting them": partial(near_duplicates, 2)},
                unit="MB/min",
            ),
            f"rows of a step, {ROWS} x {TOKENS}": Group(
                {"training step, 2.6 M": training_step, "reading its rows": rows}
            ),
            "opening prepared data": Group({"tokenizer and shards": opening}),
        },
        packages=("torch", "sentencepiece", "numpy", "datasketch"),
        make_material=make_material,
    )
