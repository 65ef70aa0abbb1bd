"""Read a file that a test describes, and compress bytes in every way that is read."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from typing import NamedTuple

import pytest
from reading import documents_and_counts

from cyberslm.data.config import DataConfig
from cyberslm.data.counts import Counts
from cyberslm.data.inputs import find_inputs


class Read(NamedTuple):
    texts: list[str]
    lines: list[int]
    names: list[str]
    counts: Counts


Reader = Callable[..., Read]


@pytest.fixture(scope="session")
def compress() -> dict[str, Callable[[bytes], bytes]]:
    zstandard = pytest.importorskip("zstandard")
    return {
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
        ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    }


@pytest.fixture
def read(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """Write content under a name and read it: its texts, their lines and sources below the folder, and the counts."""

    def read_file(name: str, content: str | bytes, **options: object) -> Read:
        path = tmp_path_factory.mktemp("in") / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        config = DataConfig(sources=(str(path),), **options)  # type: ignore[arg-type]
        (file,) = find_inputs(config.sources, key="data.sources").files
        found, counts = documents_and_counts(file, config)
        names = [document.source.removeprefix(f"{path.parent}/") for document in found]
        return Read([document.text for document in found], [document.line for document in found], names, counts)

    return read_file
