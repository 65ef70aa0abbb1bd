"""What a query may look at. One rule covers padding, packed documents, chunks and caches:

    a token sees the real tokens of its own document up to itself, the last ``window`` of them where one is set;
    its position is the number of real tokens of its document before it.

Masks are boolean, True = may look, combined with ``&`` and never added; they are made here and nowhere else. A query
that sees nothing gets zeros. `Sight` says what holds in the cheapest form there is, which kernels obey: a causal flag,
rows cut into stretches that are causal by themselves, blocks of pairs, or a boolean of every pair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cyberslm.errors import InputError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Sight(NamedTuple):
    """What the queries of one forward pass may look at; without any of these, at every key."""

    causal: bool = False
    """The queries are of all or the last of the keys' tokens; each sees those up to itself, within ``window``."""
    allowed: Tensor | None = None
    """Boolean ``(B or 1, H or 1, T, S)``; with ``causal``, the same said pair by pair."""
    runs: Tensor | None = None
    """Each run, as `find_runs` numbers them, sees itself, causally and within ``window``."""
    window: int | None = None
    skip: int = 0
    """Leading keys that no query sees; ``allowed`` doesn't cover them."""
    blocks: BlockMask | None = None
    """Which blocks of pairs hold any that may be seen, and the rule inside them: what flex attention takes."""

    def mask(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """The boolean of every pair, ``(B or 1, H or 1, T, S)``, made if need be; None where all is seen."""
        if self.allowed is not None:
            return self.allowed
        if self.blocks is not None:
            from torch.nn.attention.flex_attention import create_mask

            return create_mask(self.blocks.mask_mod, self.blocks.shape[0], 1, queries, keys, str(device))
        places = torch.arange(keys, device=device).unsqueeze(0)
        if self.runs is not None:
            runs = self.runs.to(device)
            real = runs >= 0
            return visible(places, places, real=(real, real), docs=(runs, runs), window=self.window)
        return visible(places[:, keys - queries :], places, window=self.window) if self.causal else None

    def blind(self) -> Tensor | None:
        """Boolean ``(B or 1, T, 1)`` of queries that see nothing; None where each sees something."""
        if self.runs is not None:
            return (self.runs < 0).unsqueeze(-1)
        return None if self.allowed is None else ~self.allowed.any(-1).any(1).unsqueeze(-1)


Pair = tuple[Tensor, Tensor]
"""The same thing of the queries ``(B or 1, T)`` and of the keys ``(B or 1, S)``."""


def visible(
    q_positions: Tensor,
    k_positions: Tensor,
    *,
    real: Pair | None = None,
    docs: Pair | None = None,
    window: int | None = None,
) -> Tensor:
    """The boolean ``(B or 1, 1, T, S)`` of the rule above, from positions, marks of real tokens, document numbers."""
    distance_BTS = q_positions.unsqueeze(2) - k_positions.unsqueeze(1)
    allowed_BTS = distance_BTS >= 0
    if window is not None:
        allowed_BTS = allowed_BTS & (distance_BTS < window)
    if docs is not None:
        allowed_BTS = allowed_BTS & (docs[0].unsqueeze(2) == docs[1].unsqueeze(1))
    if real is not None:
        allowed_BTS = allowed_BTS & real[0].unsqueeze(2) & real[1].unsqueeze(1)
    return allowed_BTS.unsqueeze(1)


def block_mask(positions: Tensor, docs: Tensor, window: int | None) -> BlockMask:
    """The rule for packed documents, of positions and document numbers ``(B, T)``, as blocks; nothing waits for it."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = (query >= key) & (docs[row, query] == docs[row, key])
        return allowed if window is None else allowed & (positions[row, query] - positions[row, key] < window)

    batch, columns = docs.shape
    return create_block_mask(sees, batch, None, columns, columns, device=docs.device)


def key_padding(attention_mask: Tensor, batch: int, columns: int) -> Tensor:
    """A keep-mask (1 or True = real, 0 or False = padding) of exactly ``(batch, columns)``, checked, as boolean."""
    if attention_mask.is_floating_point() or attention_mask.is_complex():
        raise InputError(
            "attention_mask must be boolean or integer (1 = real, 0 = padding; additive masks are not taken),"
            f" not {attention_mask.dtype}"
        )
    if attention_mask.shape != (batch, columns):
        raise InputError(
            f"attention_mask must have shape (batch, past + new) = ({batch}, {columns}),"
            f" not {tuple(attention_mask.shape)}"
        )
    if attention_mask.dtype != torch.bool and not ((attention_mask == 0) | (attention_mask == 1)).all():
        raise InputError("attention_mask must hold only 1 (real) and 0 (padding)")
    return attention_mask.bool()


def document_numbers(docs: Tensor, batch: int, columns: int) -> Tensor:
    """Document numbers of exactly ``(batch, columns)``, checked: equal in a row = one document."""
    if docs.is_floating_point() or docs.is_complex() or docs.dtype == torch.bool:
        raise InputError(f"docs must hold whole numbers, one for each position, not {docs.dtype}")
    if docs.shape != (batch, columns):
        raise InputError(f"docs must have shape (batch, tokens) = ({batch}, {columns}), not {tuple(docs.shape)}")
    return docs


def find_runs(real: Tensor | None, docs: Tensor | None) -> Tensor | None:
    """The run of each column, int64 ``(B, T)``: columns that lie together and are one document; -1 at padding.

    Runs are numbered from 0 in the order of rows and columns. From marks and document numbers ``(B, T)`` in host
    memory. None where a document is in two pieces, or where nothing is real: then no kernel would run, and no gradient
    reach the projections, not even zeros.
    """
    marks = torch.ones_like(docs, dtype=torch.bool) if real is None and docs is not None else real
    if marks is None:
        raise InputError("runs are those of marks or of document numbers")
    numbers = torch.zeros_like(marks, dtype=torch.int64) if docs is None else docs
    edge = (marks[:, 1:] != marks[:, :-1]) | (numbers[:, 1:] != numbers[:, :-1])
    starts = F.pad(edge, (1, 0), value=True) & marks
    row, first = starts.nonzero(as_tuple=True)
    documents = torch.stack((row, numbers[row, first]), dim=1)
    if not len(row) or len(documents.unique(dim=0)) < len(documents):
        return None
    return (starts.flatten().cumsum(0).view_as(marks) - 1).masked_fill(~marks, -1)


def cuts_of(runs: Tensor) -> Tensor:
    """Row, first column and column after the last of each run, int64 ``(R, 3)``."""
    edge = runs[:, 1:] != runs[:, :-1]
    row, first = F.pad(edge, (1, 0), value=True).nonzero(as_tuple=True)
    last = F.pad(edge, (0, 1), value=True).nonzero(as_tuple=True)[1]
    return torch.stack((row, first, last + 1), dim=1)[runs[row, first] >= 0]


def positions_in(runs: Tensor) -> tuple[Tensor, Tensor]:
    """Each column's position in its run and the run's length, int64 ``(B, T)``; zeros at padding."""
    padding, run = runs < 0, runs.clamp(min=0)
    _, first, last = cuts_of(runs).unbind(1)
    columns = torch.arange(run.shape[1], device=run.device)
    return (columns - first[run]).masked_fill(padding, 0), (last - first)[run].masked_fill(padding, 0)


def positions_among(real: Tensor | None, docs: Tensor | None) -> tuple[Tensor, Tensor]:
    """`positions_in` from marks or document numbers ``(B, T)`` whose documents need not lie together."""
    if docs is None and real is not None:
        count = real.cumsum(1)
        return (count - 1).masked_fill(~real, 0), count[:, -1:].expand_as(count)
    if docs is None:
        raise InputError("positions are counted from marks or document numbers")
    columns = torch.arange(docs.shape[1], device=docs.device).unsqueeze(0)
    marks = torch.ones_like(docs, dtype=torch.bool) if real is None else real
    seen_BT = visible(columns, columns, real=(marks, marks), docs=(docs, docs)).squeeze(1).sum(-1)
    total_BT = ((docs.unsqueeze(2) == docs.unsqueeze(1)) & marks.unsqueeze(1)).sum(-1)
    return (seen_BT - 1).clamp(min=0), total_BT.masked_fill(~marks, 0)


def in_order(past: int, new: int, window: int | None, device: torch.device) -> Sight:
    """The sight of ``new`` tokens that follow ``past`` real ones in every row."""
    skip = 0 if window is None else max(0, past - window + 1)
    if new == 1:
        return Sight(skip=skip)
    if past == 0:
        return Sight(causal=True, window=None if window is None or window >= new else window)
    places = torch.arange(skip, past + new, device=device).unsqueeze(0)
    allowed = visible(places[:, past - skip :], places, window=window)
    return Sight(causal=True, allowed=allowed, window=window, skip=skip)
