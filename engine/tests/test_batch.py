"""Identity: record ids, slugs, and frames and chunks cut by position."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thalweg.core.batch import ENVELOPE, Chunk, Frame, KafkaCursor, Locator, Partition, PulsarCursor, record_id, record_ids

PART = Partition("orders", "prod-a", "orders", 3, "id-1")
GOLDEN = "93ae396d7e354e33db4c17c0f951357c"  # of position 41: ids are stored for ever, so their making must not change

PROGRAM = """
from thalweg.core.batch import Locator, Partition, record_id
print(record_id(Locator(Partition("orders", "prod-a", "orders", 3, "id-1"), 41)).hex())
"""


def test_id_is_the_same_in_another_process_and_under_another_hash_seed() -> None:
    here = record_id(Locator(PART, 41)).hex()
    assert here == GOLDEN
    for seed in ("1", "2"):
        path = os.pathsep.join(p for p in sys.path if p)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
        )  # fmt: skip
        assert done.stdout.strip() == here


def test_id_depends_on_all_of_the_locator_and_not_on_the_name_of_the_source() -> None:
    base = record_id(Locator(PART, 7))
    others = [
        Locator(replace(PART, cluster="prod-b"), 7),
        Locator(replace(PART, topic="orders2"), 7),
        Locator(replace(PART, number=4), 7),
        Locator(replace(PART, incarnation="id-2"), 7),
        Locator(PART, 8),
        Locator(replace(PART, cluster="prod-aorders", topic=""), 7),  # pieces do not run into each other
    ]
    assert len({base, *map(record_id, others)}) == 1 + len(others)
    assert record_id(Locator(replace(PART, source="renamed"), 7)) == base


def test_ids_of_a_million_positions_differ_and_agree_with_the_single_ones() -> None:
    positions = pa.array(np.r_[np.arange(1_000_000), 2**62 + np.arange(100)])
    ids = record_ids(PART, positions)
    assert ids.type == pa.binary(16)
    assert ids.null_count == 0
    assert len(pa.compute.unique(ids)) == len(positions)
    assert ids[12_345].as_py() == record_id(Locator(PART, 12_345))


@given(st.lists(st.tuples(*[st.text("ab/%@-", max_size=3)] * 3, st.integers(0, 3)), min_size=2, max_size=6, unique=True))
def test_slugs_differ_where_partitions_do(parts: list[tuple[str, str, str, int]]) -> None:
    made = [Partition(source or "s", "c", topic or "t", n, incarnation or "i") for source, topic, incarnation, n in parts]
    assert len({p.slug for p in made}) == len(set(made))
    assert all(len(p.slug.split("/")) == 3 for p in made)


def test_cursors_of_two_technologies_cannot_be_compared() -> None:
    with pytest.raises(TypeError):
        _ = KafkaCursor(1) < PulsarCursor(1, 1, 1, 1)  # type: ignore[operator]  # the point of the test


def frame(positions: list[int], start: int, stop: int, origin: list[int]) -> Frame:
    n = len(positions)
    envelope = pa.RecordBatch.from_arrays(
        [
            pa.array(positions, pa.int64()), pa.nulls(n, ENVELOPE.field(1).type), pa.array([0] * n, pa.int8()),
            pa.nulls(n, pa.binary()), pa.nulls(n, ENVELOPE.field(4).type), pa.array([b"%d" % p for p in positions], pa.binary()),
        ],
        schema=ENVELOPE,
    )  # fmt: skip
    rows = pa.record_batch(
        {"at": pa.array([positions[o] for o in origin], pa.int64()), "n": pa.array(range(len(origin)), pa.int64())}
    )
    return Frame(PART, start, stop, envelope, rows, pa.array(origin, pa.int32()), pa.array(range(len(origin)), pa.int32()))


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    start = draw(st.integers(0, 5))
    stop = start + draw(st.integers(1, 20))
    positions = sorted(draw(st.sets(st.integers(start, stop - 1), max_size=10)))
    counts = draw(st.lists(st.integers(0, 3), min_size=len(positions), max_size=len(positions)))
    return frame(positions, start, stop, [i for i, c in enumerate(counts) for _ in range(c)])


@given(frames(), st.data())
def test_cut_frame_holds_the_rows_of_its_positions(whole: Frame, data: st.DataObject) -> None:
    low = data.draw(st.integers(whole.start, whole.stop))
    high = data.draw(st.integers(low, whole.stop))
    part = whole.within(low, high)
    wanted = [r for r in whole.rows.to_pylist() if low <= r["at"] < high]
    assert part.rows.to_pylist() == wanted
    positions = part.envelope.column("position").to_pylist()
    assert positions == [p for p in whole.envelope.column("position").to_pylist() if low <= p < high]
    assert [positions[o] for o in part.origin.to_pylist()] == [r["at"] for r in wanted]
    assert part.child is not None
    assert part.child.to_pylist() == [r["n"] for r in wanted]
    assert (part.start, part.stop) == (low, high)


@given(frames(), st.data())
def test_frame_without_rows_keeps_its_records(whole: Frame, data: st.DataObject) -> None:
    n = whole.rows.num_rows
    gone = sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=n))) if n else []
    left = whole.without(np.array(gone, dtype=np.int64))
    assert left.rows.to_pylist() == [r for i, r in enumerate(whole.rows.to_pylist()) if i not in gone]
    assert left.envelope.equals(whole.envelope)
    assert len(left.origin) == left.rows.num_rows


@given(frames(), st.integers(0, 30), st.integers(0, 30))
def test_cut_chunk_is_its_cut_frames(first: Frame, a: int, b: int) -> None:
    second = frame([first.stop + 1], first.stop, first.stop + 3, [0, 0])
    chunk = Chunk(PART, first.start, second.stop, (first, second))
    low, high = sorted(min(max(x, chunk.start), chunk.stop) for x in (a, b))
    part = chunk.within(low, high)
    rows = [r for f in part.frames for r in f.rows.to_pylist()]
    assert rows == [r for f in chunk.frames for r in f.rows.to_pylist() if low <= r["at"] < high]
    assert part.rows == len(rows)
