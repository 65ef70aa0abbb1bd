"""Other places for a run's numbers and samples, each through its own library, besides the screen and `metrics.jsonl`.

A tracker is told every record, as `metrics.jsonl` is. It writes to the run's own folder and asks no network. To add one
is a class like `TensorBoard` and its line in `TRACKERS`; what of a run that is gone on with lies after its last
checkpoint must vanish, as the same steps are coming again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Protocol

from cyberslm.errors import ConfigError, StorageError
from cyberslm.training.trackers import Record


class Tracker(Protocol):
    def write(self, record: Record) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in ``folder``: numbers as ``type/name``, samples and the run's description as text."""

    def __init__(self, folder: Path, *, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        with self._errors():
            self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None, flush_secs=10)

    def write(self, record: Record) -> None:
        kind, step = str(record["type"]), int(str(record["step"]))
        with self._errors():
            if kind == "sample":
                self._writer.add_text(f"sample/{record['prompt']}", _preformatted(str(record["text"])), step)
            elif kind == "run":
                self._writer.add_text("run", "".join(f"    {key}: {value}\n" for key, value in record.items()), step)
            else:
                for key, value in _numbers(record):
                    self._writer.add_scalar(f"{kind}/{key}", value, step)

    def sync(self) -> None:
        with self._errors():
            self._writer.flush()

    def close(self) -> None:
        with self._errors():
            self._writer.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"{self._folder} can't be written: {error.strerror or error}") from error


class Kind(NamedTuple):
    """The library of a tracker, the extra of the package that brings it, and what opens it in a folder at a step."""

    module: str
    extra: str
    open: Callable[..., Tracker]


TRACKERS: Mapping[str, Kind] = {"tensorboard": Kind("tensorboard", "trackers", TensorBoard)}


def require_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker whose library is missing: `ConfigError`."""
    for name in names:
        if find_spec(TRACKERS[name].module) is None:
            extra = TRACKERS[name].extra
            raise ConfigError(f"logging.trackers: {name} needs its library: pip install 'cyberslm[{extra}]'")


def open_trackers(names: Sequence[str], run: Path, *, step: int) -> list[Tracker]:
    """The trackers of a run that stands at ``step``, each in a folder of its name."""
    return [TRACKERS[name].open(run / name, step=step) for name in names]


def _numbers(record: Record) -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if isinstance(value, bool | int | float) and key != "step":
            yield key, float(value)


def _preformatted(text: str) -> str:
    """Markdown that shows text as it is."""
    return "".join(f"    {line}\n" for line in text.splitlines()) or "    \n"
