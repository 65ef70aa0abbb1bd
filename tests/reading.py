"""Reading one file, as a function that a worker process can import."""

from __future__ import annotations

from cyberslm.data.config import DataConfig
from cyberslm.data.counts import Counts
from cyberslm.data.inputs import InputFile
from cyberslm.data.sources import Document, read_documents


def documents_and_counts(file: InputFile, config: DataConfig) -> tuple[list[Document], Counts]:
    counts = Counts()
    return list(read_documents(file, config, counts)), counts
