"""A calibration as a file: JSON with the reports that say what it is worth, bound to what it was made for.

The scores that it turns into probabilities are those of one model, one set of labels and one method; with others it
would lie, so it is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cyberslm import files
from cyberslm.errors import ConfigError
from cyberslm.evaluation.calibration import Calibration, Report

KIND = "cyberslm-calibration"
MAX_BYTES = 1 << 20


class Binding(NamedTuple):
    """The hashes of the model and of the labels, the number of labels, and the method."""

    model: str
    labels: str
    number: int
    method: str


@dataclass(frozen=True)
class Calibrated:
    """A calibration, what it is bound to, and how good it is."""

    calibration: Calibration
    bound_to: Binding
    raw: Report
    """Of the scores as they are."""
    fitted: Report
    """Of records that were not fitted on."""

    def lines(self) -> Iterator[str]:
        """For people."""
        for name, found in (("as it is", self.raw), ("calibrated", self.fitted)):
            low, high = found.interval
            yield (
                f"{name}: accuracy {found.accuracy:.3f} (95 % interval {low:.3f} to {high:.3f}),"
                f" calibration error {found.calibration_error:.3f}"
            )
        yield f"{self.raw.examples:,} labelled records; always giving the commonest label: {self.raw.commonest:.3f}"
        yield "abstain below  answered  accuracy"
        curve = self.fitted.abstention
        for kept, later in zip(curve, (*curve[1:], None), strict=True):
            if later is not None and later.share == kept.share:
                continue
            accuracy = "-" if kept.accuracy is None else f"{kept.accuracy:.3f}"
            yield f"{kept.threshold:13.2f}{kept.share:10.3f}{accuracy:>10}"

    def to_json(self) -> dict[str, Any]:
        return {"kind": KIND, **asdict(self), "bound_to": self.bound_to._asdict()}

    def save(self, path: Path) -> None:
        """Write it with its reports as JSON."""
        files.write_text(path, json.dumps(self.to_json(), indent=2) + "\n")


def saved_calibration(path: Path, wanted: Binding) -> Calibration:
    """The calibration of a file. Raises `ConfigError` when it is damaged or bound to something else."""
    try:
        with path.open("rb") as stream:
            found = json.loads(stream.read(MAX_BYTES))
    except OSError as error:
        raise ConfigError(f"--calibration {path} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("kind") != KIND or not isinstance(found.get("bound_to"), dict):
        raise ConfigError(f"--calibration {path} is no calibration: make one with --calibrate")
    for what, own in wanted._asdict().items():
        if found["bound_to"].get(what) != own:
            raise ConfigError(
                f"--calibration {path} was made for another {what.replace('number', 'number of labels')}:"
                " calibrate again with --calibrate"
            )
    held = found.get("calibration")
    bias = held.get("bias") if isinstance(held, dict) else None
    values = [held.get("temperature"), *bias] if isinstance(held, dict) and isinstance(bias, list) else []
    if len(values) != 1 + wanted.number or not all(map(_is_number, values)) or values[0] <= 0:
        raise ConfigError(f"--calibration {path} is damaged: make it again with --calibrate")
    return Calibration(float(values[0]), tuple(map(float, values[1:])))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
