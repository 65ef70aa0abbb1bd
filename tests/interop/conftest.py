from __future__ import annotations

from pydoc_data.topics import topics

import pytest
from foreign import byte_level
from tokenizers import Tokenizer as Library


@pytest.fixture(scope="session")
def library() -> Library:
    return byte_level(list(topics.values())[:40])


@pytest.fixture(scope="session")
def qwen_library() -> Library:
    return byte_level(list(topics.values())[:40], "qwen2")
