"""Replay: a general corpus among a run's own text, as one more source of its prepared data.

The mixture is worked out so that the run's own sources come as they would alone, and the general one gives its share of
the tokens besides; an epoch is once through the run's own text. Validation is told apart by source: what decides is the
run's own text, and the general text stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable

from cyberslm.data.config import MixtureUnit
from cyberslm.data.prepare import Prepared
from cyberslm.errors import ConfigError
from cyberslm.recipes.config import TrainRun
from cyberslm.recipes.finetune import replayed
from cyberslm.training.loss import Score

DOMAIN, GENERAL = "domain", "general"


def mixture_of(run: TrainRun, prepared: Prepared) -> tuple[dict[int, float], MixtureUnit]:
    """What each source of the training split contributes, and what that counts; empty: all rows once."""
    replay, given = replayed(run), run.data.parts
    if replay is None:
        return given, run.data.mixture_unit
    general = _general_number(prepared, "data.sources[")
    held = {each.source: each.end_token - each.first_token for each in prepared.train.sources}
    if general not in held:
        raise ConfigError("replay.path: no training text is left of it")
    own = {source: tokens for source, tokens in held.items() if source != general}
    if given and run.data.mixture_unit == "share":
        asked = {source: given.get(source, 0.0) for source in own}
        total = sum(own[source] for source in own if asked[source])
        wanted = {source: total * asked[source] / sum(asked.values()) for source in own}
    else:
        wanted = {source: own[source] * given.get(source, 0.0) if given else own[source] for source in own}
    replayed_tokens = sum(wanted.values()) * replay.weight / (1 - replay.weight)
    wanted[general] = replayed_tokens
    return {source: tokens / held[source] for source, tokens in wanted.items()}, "epochs"


def validated_apart(run: TrainRun, prepared: Prepared) -> list[frozenset[int] | None]:
    """The sources, by number, that are validated on rows of their own; None: all of them together."""
    if replayed(run) is None or prepared.validation is None:
        return [None]
    name = naming(run, prepared)
    numbers = [each.source for each in prepared.validation.sources]
    parts = [frozenset(number for number in numbers if name(number) == part) for part in (DOMAIN, GENERAL)]
    return [part for part in parts if part]


def naming(run: TrainRun, prepared: Prepared) -> Callable[[int], str]:
    """The name under which each source of the validation split is scored."""
    if replayed(run) is None:
        return prepared.validation_source
    own = any(key.startswith("data.validation[") for key in prepared.manifest["sources"])
    general = _general_number(prepared, "data.validation[" if own else "data.sources[")
    return lambda number: GENERAL if number == general else DOMAIN


def deciding(score: Score) -> Score:
    """The score that decides: of the run's own text where general text is told apart from it."""
    domain = score.by_source.get(DOMAIN)
    if domain is None or GENERAL not in score.by_source:
        return score
    return Score(domain.loss_sum, domain.num_tokens, domain.num_bytes, score.by_source)


def _general_number(prepared: Prepared, prefix: str) -> int:
    """The last source's number, as `FinetuneRun.corpus` puts it there."""
    return sum(key.startswith(prefix) for key in prepared.manifest["sources"]) - 1
