from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.data.loader import IGNORE, PADDING, Batch, RowLoader
from cyberslm.data.order import row_at
from cyberslm.data.shards import Place, ShardWriter
from cyberslm.data.store import TokenStore
from cyberslm.errors import DataError, InputError

SHA = "00" * 32
VOCAB = 5000


def store_of(folder: Path, tokens: list[int], *, shard_tokens: int = 7) -> TokenStore:
    """Tokens as documents of up to three tokens, over several shards."""
    folder.mkdir(exist_ok=True)
    with ShardWriter(folder, "train", vocab_size=VOCAB, tokenizer_sha256=SHA, shard_tokens=shard_tokens) as writer:
        for start in range(0, len(tokens), 3):
            writer.add(np.array(tokens[start : start + 3]), text_bytes=3)
    return TokenStore.open(folder, "train", tokenizer_sha256=SHA, vocab_size=VOCAB)


def loader_of(folder: Path, tokens: list[int], **options: int) -> RowLoader:
    given_ = {"seq_len": 4, "batch_rows": 3, "seed": 1, "pad_id": 0} | options
    return RowLoader(store_of(folder, tokens), **given_)


def epoch(seed: int, number: int, rows: int) -> list[int]:
    return row_at(seed, number, np.arange(rows), rows).tolist()


def epochs(seed: int, number: int, rows: int) -> list[list[int]]:
    return row_at(seed, np.arange(number)[:, None], np.arange(rows), rows).tolist()


def row_in_plain_integers(seed: int, epoch_: int, position: int, rows: int) -> int:
    """The order once more, in Python's own integers."""
    top = 2**64

    def mix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) % top
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % top
        value = (value ^ value >> 27) * 0x94D049BB133111EB % top
        return value ^ value >> 31

    half = max(3, ((rows - 1).bit_length() + 1) // 2)
    start = mix(mix(seed % top) ^ epoch_)
    value = position
    while True:
        left, right = divmod(value, 2**half)
        for number in range(8):
            left, right = right, left ^ mix(right ^ mix(start ^ number)) % 2**half
        value = left * 2**half + right
        if value < rows:
            return value


def targets(batches: list[Batch]) -> list[int]:
    return [token for batch in batches for token in batch.targets.flatten().tolist() if token != IGNORE]


# Order


@pytest.mark.parametrize("rows", [*range(1, 301), 1023, 1024, 1025, 65_537, 262_143])
def test_each_epoch_is_a_permutation_of_all_rows(rows):
    assert sorted(epoch(7, 3, rows)) == list(range(rows))


@pytest.mark.parametrize("rows", [10**9 + 7, 2**40 + 1, 2**62 + 3])
def test_huge_ranges_stay_inside_and_without_repeats(rows):
    positions = np.concatenate([np.arange(5000), rows - 1 - np.arange(5000)])
    values = row_at(3, 0, positions, rows)
    assert values.min() >= 0
    assert values.max() < rows
    assert len(set(values.tolist())) == 10_000
    assert abs(values.mean() / rows - 0.5) < 0.02


def test_orders_differ_between_epochs_and_seeds():
    orders = {tuple(epoch(seed, number, 50)) for seed in range(10) for number in range(10)}
    assert len(orders) == 100


def test_every_order_of_few_rows_occurs_about_equally_often():
    seen = Counter(map(tuple, epochs(5, 4800, 4)))
    assert set(seen) == set(permutations(range(4)))
    chi_square = sum((count - 200) ** 2 / 200 for count in seen.values())
    assert chi_square < 60  # 23 degrees of freedom: beyond 60 once in 30,000 seeds


def test_an_order_looks_random():
    rows = 4096
    order = np.array(epoch(11, 0, rows))
    steps = np.diff(order)
    assert 0.46 < (steps > 0).mean() < 0.54
    assert (np.abs(steps) == 1).sum() < 12
    assert (order == np.arange(rows)).sum() < 10
    assert abs(np.corrcoef(order, np.arange(rows))[0, 1]) < 0.08
    counts = np.histogram2d(np.arange(rows), order, bins=8)[0]
    assert ((counts - rows / 64) ** 2 / (rows / 64)).sum() < 110  # 49 degrees of freedom


def test_a_row_lands_on_every_position_over_the_epochs():
    landed = Counter(order.index(0) for order in epochs(2, 2000, 10))
    assert set(landed) == set(range(10))
    assert max(landed.values()) < 270


def test_the_order_is_fixed_for_ever():
    """A change here would break the exact resumption of every earlier run."""
    assert epoch(0, 0, 12) == [2, 11, 5, 0, 1, 4, 8, 6, 3, 10, 7, 9]
    assert epoch(-1, 2**40, 12) == [8, 9, 7, 10, 4, 0, 6, 11, 3, 2, 5, 1]
    assert row_at(123, 4, [0, 999_999], 1_000_000).tolist() == [272921, 446252]


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40), st.integers(1, 2**62), st.data())
@settings(deadline=None, max_examples=80)
def test_the_order_equals_its_definition_in_plain_integers(seed, number, rows, data):
    position = data.draw(st.integers(0, rows - 1))
    assert int(row_at(seed, number, position, rows)) == row_in_plain_integers(seed, number, position, rows)


def test_asking_one_by_one_equals_asking_for_many_over_epochs():
    numbers, positions = [0, 0, 1, 9], [4, 0, 4, 2]
    together = row_at(8, numbers, positions, 5).tolist()
    assert together == [int(row_at(8, e, p, 5)) for e, p in zip(numbers, positions, strict=True)]


@pytest.mark.parametrize(("position", "rows"), [(5, 5), (0, 0)])
def test_a_position_outside_the_epoch_is_refused(position, rows):
    with pytest.raises(InputError, match="positions must lie"):
        row_at(0, 0, position, rows)


# Rows


@given(st.integers(2, 60), st.integers(1, 12), st.integers(1, 7), st.integers(0, 2**64))
@settings(deadline=None, max_examples=80)
def test_every_token_but_the_first_is_a_target_once_an_epoch(tmp_path_factory, size, seq_len, batch_rows, seed):
    """The last partial window used to disappear without a count."""
    tokens = list(range(100, 100 + size))
    loader = loader_of(tmp_path_factory.mktemp("rows"), tokens, seq_len=seq_len, batch_rows=batch_rows, seed=seed)
    rows = loader.rows_per_epoch
    assert targets(list(loader.sequential(batch_rows))) == tokens[1:]
    # batch_rows epochs fill a whole number of steps
    seen = Counter(targets([loader.batch(step) for step in range(rows)]))
    assert seen == Counter({token: batch_rows for token in tokens[1:]})


def test_inputs_come_one_before_their_targets_and_padding_is_by_position(tmp_path):
    loader = loader_of(tmp_path, [9, 0, 0, 5, 6, 0, 7], pad_id=0)
    (batch,) = loader.sequential(8)
    assert batch.input_ids.tolist() == [[9, 0, 0, 5], [6, 0, 0, 0]]
    assert batch.targets.tolist() == [[0, 0, 5, 6], [0, 7, IGNORE, IGNORE]]
    assert batch.input_ids.dtype == batch.targets.dtype == torch.int64


@pytest.mark.parametrize(("size", "rows"), [(2, 1), (3, 1), (4, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_a_context_and_one_token_is_one_full_row(tmp_path, size, rows):
    loader = loader_of(tmp_path, list(range(1, size + 1)))
    assert loader.rows_per_epoch == rows
    assert len(targets(list(loader.sequential(1)))) == size - 1


def test_a_corpus_of_one_token_is_refused_with_the_smallest_size(tmp_path):
    with pytest.raises(DataError, match="has 1 tokens; the smallest that can be learned from is 2"):
        loader_of(tmp_path, [4])


def test_the_start_of_a_document_is_not_a_target(tmp_path):
    tokens = [2, 7, 3, 2, 8, 3, 2, 9, 3]
    loader = loader_of(tmp_path, tokens, bos_id=2, seq_len=3)
    assert targets(list(loader.sequential(2))) == [7, 3, 8, 3, 9, 3]
    assert [token for batch in loader.sequential(2) for token in batch.input_ids.flatten().tolist()][:8] == tokens[:8]


# Batches


def rows_of(loader: RowLoader, step: int, **slice_: int) -> list[list[int]]:
    return loader.batch(step, **slice_).input_ids.tolist()


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(0, 5))
@settings(deadline=None, max_examples=60)
def test_ranks_and_parts_together_are_the_step(tmp_path_factory, batch_rows, world, parts, step):
    loader = loader_of(tmp_path_factory.mktemp("ranks"), list(range(1, 40)), batch_rows=batch_rows)
    if world * parts > batch_rows:
        with pytest.raises(InputError, match="can't be cut"):
            loader.batch(step, world=world, parts=parts)
        return
    slices = [
        rows_of(loader, step, rank=rank, world=world, part=part, parts=parts)
        for rank in range(world)
        for part in range(parts)
    ]
    assert [row for rows in slices for row in rows] == rows_of(loader, step)
    assert {len(rows) for rows in slices} <= {batch_rows // len(slices), -(-batch_rows // len(slices))}


def test_a_batch_depends_on_nothing_but_its_step(tmp_path):
    tokens = list(range(1, 80))
    straight = [rows_of(loader_of(tmp_path / "a", tokens), step) for step in range(1)]
    loader = RowLoader(store_of(tmp_path / "b", tokens), seq_len=4, batch_rows=3, seed=1, pad_id=0)
    np.random.seed(0)
    torch.manual_seed(0)
    backwards = [rows_of(loader, step) for step in reversed(range(30))][::-1]
    assert backwards[:1] == straight
    assert backwards == [rows_of(loader, step) for step in range(30)]


def test_batches_run_over_the_border_of_an_epoch(tmp_path):
    loader = loader_of(tmp_path, list(range(1, 22)), batch_rows=3)
    assert loader.rows_per_epoch == 5
    rows = [row for step in range(5) for row in rows_of(loader, step)]
    starts = [(row[0] - 1) // 4 for row in rows]
    assert starts == epoch(1, 0, 5) + epoch(1, 1, 5) + epoch(1, 2, 5)


def test_a_batch_larger_than_an_epoch_repeats_rows_in_new_orders(tmp_path):
    loader = loader_of(tmp_path, [1, 2, 3], batch_rows=4)
    assert rows_of(loader, 0) == [[1, 2, 0, 0]] * 4


STAGES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), max_size=3)


@given(STAGES, st.integers(0, 14), st.integers(0, 20), st.integers(1, 2))
@settings(deadline=None, max_examples=40)
def test_ramped_steps_are_runs_of_the_endless_order(tmp_path_factory, ramp, step, passed, world):
    """The truth: one row a step, in the same order; each stage's steps take its number of rows."""
    folder, tokens = tmp_path_factory.mktemp("ramp"), list(range(100, 160))
    single = loader_of(folder, tokens, batch_rows=1)
    loader = RowLoader(single.store, seq_len=4, batch_rows=5, seed=1, pad_id=0, ramp=ramp)
    sizes = [rows for steps, rows in ramp for _ in range(steps)] + [5] * 20
    first = sum(sizes[:step])
    assert loader.first_row(step) == first
    wanted = [single.batch(row + passed).input_ids[0].tolist() for row in range(first, first + sizes[step])]
    if world <= sizes[step]:
        parts = [loader.batch(step, rank=rank, world=world, passed=passed) for rank in range(world)]
        assert [row for part in parts for row in part.input_ids.tolist()] == wanted
    if not passed:
        assert loader.bordered(step).input_ids.tolist() == wanted


def test_step_of_the_ramp_with_fewer_rows_than_ranks_is_refused(tmp_path):
    loader = loader_of(tmp_path, list(range(100, 160)), ramp=((2, 1),))
    with pytest.raises(InputError, match="1 rows a step can't be cut into 2 ranks x 1 parts"):
        loader.batch(1, world=2)
    assert loader.batch(2, world=2).input_ids.shape[0] == 1


def test_validation_batches_of_the_ranks_are_those_of_one(tmp_path):
    loader = loader_of(tmp_path, list(range(1, 60)))
    alone = [batch.targets.tolist() for batch in loader.sequential(2)]
    shared = [[batch.targets.tolist() for batch in loader.sequential(2, rank=rank, world=3)] for rank in range(3)]
    assert [shared[index % 3][index // 3] for index in range(len(alone))] == alone


@pytest.mark.parametrize(
    "slice_", [{"rank": 1}, {"rank": -1}, {"part": 1}, {"step": -1}, {"rank": 2, "world": 2}, {"part": 3, "parts": 3}]
)
def test_a_slice_that_does_not_exist_is_refused(tmp_path, slice_):
    loader = loader_of(tmp_path, list(range(1, 60)))
    with pytest.raises(InputError, match="no slice"):
        loader.batch(**({"step": 0} | slice_))


@pytest.mark.parametrize("options", [{"seq_len": 0}, {"batch_rows": 0}])
def test_sizes_below_one_are_refused(tmp_path, options):
    with pytest.raises(InputError, match="must be at least 1"):
        loader_of(tmp_path, [1, 2, 3], **options)


def test_validation_batches_of_no_rows_are_refused(tmp_path):
    with pytest.raises(InputError, match="no batches of 0 rows"):
        next(loader_of(tmp_path, [1, 2, 3]).sequential(0))


def test_limited_validation_takes_rows_evenly_whatever_the_batch(tmp_path):
    loader = loader_of(tmp_path, list(range(4, 56)), seq_len=5)
    assert loader.rows_per_epoch == 11
    wanted = [loader.store.slice(row * 5, row * 5 + 1)[0] for row in (0, 2, 5, 8)]
    for batch_rows in (1, 3, 4, 9):
        batches = list(loader.sequential(batch_rows, limit=4))
        assert torch.cat([batch.input_ids[:, 0] for batch in batches]).tolist() == wanted
    assert sum(len(batch.input_ids) for batch in loader.sequential(4, limit=99)) == 11


# Packed, isolated, masked and mixed rows


class Made(NamedTuple):
    """A store whose token ids are their places + 10, its documents' edges, sources and what is trained."""

    store: TokenStore
    edges: list[int]
    sources: list[int]
    trained: np.ndarray


def make(folder: Path, sizes: list[int], *, sources: list[int] | None = None, masked: bool = False) -> Made:
    owners = [0] * len(sizes) if sources is None else sorted(sources)
    edges = [0, *np.cumsum(sizes).tolist()]
    trained = np.ones(edges[-1], bool)
    if masked:
        trained = np.random.default_rng(len(sizes)).random(edges[-1]) < 0.7
    with ShardWriter(folder, "train", vocab_size=VOCAB, tokenizer_sha256=SHA, shard_tokens=17) as writer:
        for index, (first, end) in enumerate(pairwise(edges)):
            place = Place(owners[index], index, 1)
            writer.add(np.arange(first, end) + 10, text_bytes=1, place=place, trained=trained[first:end])
    return Made(TokenStore.open(folder, "train", tokenizer_sha256=SHA, vocab_size=VOCAB), edges, owners, trained)


SIZES = st.lists(st.integers(1, 23), min_size=1, max_size=25)
MODES = st.sampled_from([("concat", False), ("concat", True), ("pack", False), ("pack", True)])
OPTIONS = {"batch_rows": 3, "seed": 1, "pad_id": 0}


def open_loader(made: Made, mode: tuple[str, bool], seq_len: int, **options: object) -> RowLoader | None:
    try:
        return RowLoader(made.store, seq_len=seq_len, layout=mode[0], isolate=mode[1], **(OPTIONS | options))
    except DataError:
        assert mode == ("pack", True) or made.store.num_tokens < 2
        return None


@given(SIZES, MODES, st.integers(1, 12), st.booleans(), st.integers(1, 3))
@settings(deadline=None, max_examples=150)
def test_every_token_is_a_target_once_or_is_known_not_to_be_one(tmp_path_factory, sizes, mode, seq_len, masked, every):
    """In each mode: first tokens of documents (of the text, when it is cut and not isolated) and what the mask says."""
    made = make(tmp_path_factory.mktemp("rows"), sizes, masked=masked, sources=[i // every for i in range(len(sizes))])
    loader = open_loader(made, mode, seq_len)
    if loader is None:
        return
    out = {0} if mode == ("concat", False) else set(made.edges[:-1])
    out |= set(np.flatnonzero(~made.trained).tolist())
    wanted = [token + 10 for token in range(made.store.num_tokens) if token not in out]
    assert sorted(targets(list(loader.sequential(4)))) == wanted
    drawn = Counter(targets([loader.batch(step) for step in range(loader.rows_per_epoch)]))
    assert drawn == Counter(dict.fromkeys(wanted, 3))


@given(SIZES, MODES, st.integers(1, 12), st.integers(1, 3))
@settings(deadline=None, max_examples=100)
def test_targets_follow_their_inputs_within_a_document_and_numbers_tell_documents_apart(
    tmp_path_factory, sizes, mode, seq_len, every
):
    made = make(tmp_path_factory.mktemp("rows"), sizes, sources=[i // every for i in range(len(sizes))])
    loader = open_loader(made, mode, seq_len)
    if loader is None:
        return
    document = np.repeat(np.arange(len(sizes)), sizes)
    for batch in loader.sequential(2):
        assert (batch.docs is None) == (not mode[1])
        for line in range(len(batch.input_ids)):
            inputs, wanted = batch.input_ids[line].numpy() - 10, batch.targets[line].numpy() - 10
            real = inputs >= 0
            assert not (np.diff(real.astype(int)) > 0).any()
            learned = batch.targets[line].numpy() != IGNORE
            assert (wanted[learned] == inputs[learned] + 1).all()
            if mode != ("concat", False):
                assert (document[wanted[learned]] == document[inputs[learned]]).all()
            if batch.docs is not None:
                numbers = batch.docs[line].numpy()
                assert (numbers[~real] == PADDING).all()
                same = numbers[real][:, None] == numbers[real]
                assert (same == (document[inputs[real]][:, None] == document[inputs[real]])).all()


@given(SIZES, MODES, st.booleans(), st.integers(1, 9), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(0, 9))
@settings(deadline=None, max_examples=60)
def test_ranks_parts_and_restarts_give_the_same_batches_in_every_mode(
    tmp_path_factory, sizes, mode, mixed, batch_rows, world, parts, step
):
    if world * parts > batch_rows:
        batch_rows *= world * parts
    made = make(tmp_path_factory.mktemp("ranks"), sizes, sources=[i % 3 for i in range(len(sizes))])
    mixture = {source: 0.5 + source for source in range(3)} if mixed and len(sizes) > 2 else {}
    try:
        loaders = [
            RowLoader(
                made.store,
                seq_len=6,
                seed=5,
                pad_id=0,
                batch_rows=batch_rows,
                layout=mode[0],
                isolate=mode[1],
                mixture=mixture,
            )
            for _ in range(2)
        ]
    except DataError:
        return
    whole = loaders[0].batch(step)
    for earlier in range(step):
        loaders[1].batch(earlier)
    pieces = [
        loaders[1].batch(step, rank=rank, world=world, part=part, parts=parts)
        for rank in range(world)
        for part in range(parts)
    ]
    assert torch.equal(torch.cat([piece.input_ids for piece in pieces]), whole.input_ids)
    assert torch.equal(torch.cat([piece.targets for piece in pieces]), whole.targets)
    if mode[1]:
        assert torch.equal(torch.cat([piece.docs for piece in pieces]), whole.docs)


def test_a_mixture_draws_rows_of_the_sources_in_their_shares(tmp_path):
    made = make(tmp_path, [9] * 40, sources=[0] * 30 + [2] * 10)
    loader = open_loader(made, ("pack", True), 8, mixture={0: 1, 2: 3}, batch_rows=40)
    assert loader.rows_per_epoch == 40
    assert [quota[:2] for quota in loader.quotas] == [(0, 30), (2, 10)]
    border = made.edges[30] + 10
    for step in range(4):
        firsts = loader.batch(step).input_ids[:, 0]
        assert int((firsts >= border).sum()) == 30
        assert Counter(firsts[firsts >= border].tolist()) == dict.fromkeys(range(border, border + 90, 9), 3)


def test_cut_rows_of_a_mixture_stay_within_their_source(tmp_path):
    made = make(tmp_path, [5] * 8, sources=[0] * 3 + [1] * 5)
    loader = open_loader(made, ("concat", False), 4, mixture={0: 1, 1: 1}, mixture_unit="epochs", batch_rows=10)
    assert loader.rows_per_epoch == 4 + 6
    border = made.edges[3] + 10
    for inputs, wanted in zip(*loader.batch(0)[:2], strict=True):
        tokens = [*inputs[inputs > 0].tolist(), *wanted[wanted != IGNORE].tolist()]
        assert max(tokens) < border or min(tokens) >= border


@pytest.mark.parametrize(
    ("mixture", "problem"),
    [({0: 1}, "nothing of source 1"), ({0: 1, 1: 1, 4: 2}, "source 4 has no training text")],
)
def test_a_mixture_that_does_not_fit_the_sources_is_refused(tmp_path, mixture, problem):
    made = make(tmp_path, [5, 5], sources=[0, 1])
    with pytest.raises(DataError, match=problem):
        open_loader_strict(made, mixture)


def open_loader_strict(made: Made, mixture: dict[int, float]) -> RowLoader:
    return RowLoader(made.store, seq_len=4, mixture=mixture, **OPTIONS)


def test_a_source_of_share_0_is_left_out(tmp_path):
    made = make(tmp_path, [5, 5, 5], sources=[0, 1, 1])
    loader = RowLoader(made.store, seq_len=4, mixture={0: 0, 1: 2}, **OPTIONS)
    assert min(targets([loader.batch(step) for step in range(9)])) > made.edges[1] + 10


def test_documents_of_one_token_have_nothing_to_isolate(tmp_path):
    made = make(tmp_path, [1, 1, 1])
    with pytest.raises(DataError, match="no document of two tokens"):
        RowLoader(made.store, seq_len=4, layout="pack", isolate=True, **OPTIONS)


def test_measured_rows_tell_the_source_of_each_target(tmp_path):
    made = make(tmp_path, [4, 3, 6], sources=[0, 2, 3])
    loader = open_loader(made, ("concat", False), 5)
    by_target = {}
    for batch in loader.sequential(2):
        real = batch.targets != IGNORE
        by_target |= dict(zip(batch.targets[real].tolist(), batch.sources[real].tolist(), strict=True))
    assert by_target == dict(zip(range(11, 23), [0] * 3 + [2] * 3 + [3] * 6, strict=True))
    assert loader.batch(0).sources is None


def test_a_look_at_a_batch_numbers_documents_that_are_not_isolated(tmp_path):
    made = make(tmp_path, [2, 3, 4])
    loader = open_loader(made, ("concat", False), 8, batch_rows=1)
    assert loader.batch(0).docs is None
    assert loader.bordered(0).docs.tolist() == [[0, 0, 1, 1, 1, 2, 2, 2]]


def test_a_packed_isolated_row_is_as_drawn(tmp_path):
    made = make(tmp_path, [3, 4, 2])
    batch = open_loader(made, ("pack", True), 8, batch_rows=1).batch(0)
    assert batch.input_ids.tolist() == [[10, 11, 13, 14, 15, 17, 0, 0]]
    assert batch.targets.tolist() == [[11, 12, 14, 15, 16, 18, IGNORE, IGNORE]]
    assert batch.docs.tolist() == [[0, 0, 1, 1, 1, 2, PADDING, PADDING]]


def test_a_packed_row_that_is_not_isolated_is_as_drawn(tmp_path):
    made = make(tmp_path, [3, 3, 2])
    batch = open_loader(made, ("pack", False), 9, batch_rows=1).batch(0)
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 14, 15, 16, 17, 0]]
    assert batch.targets.tolist() == [[11, 12, IGNORE, 14, 15, IGNORE, 17, IGNORE, IGNORE]]
    assert batch.docs is None


@pytest.mark.parametrize("layout", ["concat", "pack"])
def test_rows_are_counted_by_source(tmp_path, layout):
    made = make(tmp_path, [20, 9, 31], sources=[0, 1, 1])
    loader = open_loader(made, (layout, False), 4, by_source=True)
    for sources in (None, {0}, {1}, {0, 1}):
        held = sum(len(batch.input_ids) for batch in loader.sequential(3, sources=sources))
        assert loader.num_rows(sources) == held > 0
    assert loader.num_rows({0}) + loader.num_rows({1}) == loader.num_rows()
