"""Every exception the package raises on purpose, as one tree.

    CyberSLMError                  anything below; one line that names the key, the value, the limit and the fix
    |- ConfigError    (ValueError) a setting, in YAML, on the command line or in a dataclass
    |- DataError      (ValueError) source text or token shards
    |- TokenizerError (ValueError) a tokenizer file, its training, or ids outside its vocabulary
    |- InputError     (ValueError) a tensor or argument of the wrong shape, type or range
    |- GenerationError(ValueError) sampling settings, or a prompt that can't be continued
    |- IntegrityError              a file or folder that is damaged, incomplete or not what it claims to be
    |- StorageError                something that could not be written: disk full, no permission, folder in use
    `- TrainingError               a run that can't go on, such as a loss that stays non-finite

``exit_code`` is what the command line returns: 2 for what the user can mend before any work starts, 1 for the rest.
"""

from __future__ import annotations


class CyberSLMError(Exception):
    """Base of all errors that CyberSLM raises on purpose."""

    exit_code = 1


class ConfigError(CyberSLMError, ValueError):
    exit_code = 2


class DataError(CyberSLMError, ValueError):
    exit_code = 2


class TokenizerError(CyberSLMError, ValueError):
    exit_code = 2


class InputError(CyberSLMError, ValueError):
    exit_code = 2


class GenerationError(CyberSLMError, ValueError):
    exit_code = 2


class IntegrityError(CyberSLMError):
    exit_code = 2


class StorageError(CyberSLMError):
    exit_code = 1


class BusyError(StorageError):
    """Another process is writing there."""


class TrainingError(CyberSLMError):
    exit_code = 1
