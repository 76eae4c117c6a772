"""The reader of event files, with files by TensorBoard's writer and with crafted ones."""

import contextlib
import os
import struct
import time

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

from jobs import event_files, selectors, telemetry
from jobs.event_files import read_scalars
from jobs.models import MetricPoint
from tests.jobs.event_files import scalar, write

LIMIT = 1 << 20


def read(folder, cursor=None, limit=LIMIT):
    cursor = {} if cursor is None else cursor
    return [(point.tag, point.step, round(point.value, 4)) for point in read_scalars(folder, (), cursor, limit)]


def frame(data, length=None):
    """Return a record of an event file, with a length that may be wrong, and zeros for its checksums."""
    return struct.pack("<QI", len(data) if length is None else length, 0) + data + b"\0" * 4


def test_scalars_of_tensorboards_own_writer_are_read_once(tmp_path):
    write(tmp_path, scalar("loss", 1, 0.5), scalar("loss", 2, 0.25))
    cursor = {}
    assert read(tmp_path, cursor) == [("loss", 1, 0.5), ("loss", 2, 0.25)]
    assert read(tmp_path, cursor) == []
    write(tmp_path / "eval", scalar("accuracy", 2, 0.75))
    assert read(tmp_path, cursor) == [("accuracy", 2, 0.75)]


def test_a_scalar_as_a_tensor_is_read_too(tmp_path):
    double, string = 2, 7  # numbers of TensorFlow's types

    def event(dtype=1, **tensor):
        """Return an event with a tensor, by default of 32-bit floats."""
        return Event(summary=Summary(value=[Summary.Value(tag="t", tensor=TensorProto(dtype=dtype, **tensor))]))

    vector = TensorShapeProto(dim=[TensorShapeProto.Dim(size=2)])
    write(
        tmp_path,
        event(float_val=[1.5]),
        event(tensor_content=struct.pack("<f", 2.5)),
        event(dtype=double, tensor_content=struct.pack("<d", 3.5)),
        # None of these is a scalar:
        event(tensor_content=b"123"),
        event(dtype=string, tensor_content=b"text"),
        event(float_val=[9.0, 9.0], tensor_shape=vector),
    )
    assert [value for _tag, _step, value in read(tmp_path)] == [1.5, 2.5, 3.5]


def test_a_record_counts_when_it_is_whole_and_too_large_ones_are_skipped(tmp_path):
    path = tmp_path / "events.out.tfevents.1"
    whole = frame(scalar("loss", 1, 0.5).SerializeToString())
    cursor = {}
    path.write_bytes(whole[:-3])
    assert read(tmp_path, cursor) == []
    path.write_bytes(whole + frame(b"x" * (event_files.MAX_RECORD_BYTES + 1)) + whole)
    points = []
    for _ in range(4):  # a read ends at its limit, here with the large record
        points += read(tmp_path, cursor)
    assert points == [("loss", 1, 0.5)] * 2


def test_garbage_ends_the_reading_of_its_file_only(tmp_path):
    write(tmp_path / "fine", scalar("loss", 1, 0.5))
    lengths = frame(b"", length=2**64 - 1), frame(b"", length=2**62)
    for number, data in enumerate([b"", b"\xff" * 1000, b"\0" * 1000, frame(b"\xff\xff\xff"), *lengths]):
        (tmp_path / f"bad.tfevents.{number}").write_bytes(data)
    assert read(tmp_path) == [("loss", 1, 0.5)]


def test_no_link_or_pipe_is_followed(tmp_path):
    outside = tmp_path / "outside"
    write(outside, scalar("secret", 1, 42))
    secret = next(outside.iterdir())
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "a.tfevents").symlink_to(secret)
    (inside / "folder").symlink_to(outside)
    os.mkfifo(inside / "pipe.tfevents")
    (inside / "dir.tfevents").mkdir()
    (inside / "null.tfevents").symlink_to("/dev/zero")
    assert read(inside) == []
    (tmp_path / "swapped").symlink_to(outside)
    assert read(tmp_path / "swapped") == []
    assert read(tmp_path / "missing") == []
    assert read(secret) == []


def test_one_read_takes_no_more_than_its_limit(tmp_path):
    for name in "ab":
        write(tmp_path / name, *(scalar(name, step, step) for step in range(1, 101)))
    cursor = {}
    points = read(tmp_path, cursor, limit=1000)
    assert 0 < len(points) < 60  # a record has 16 bytes around its event
    for _ in range(20):
        points += read(tmp_path, cursor, limit=1000)
    assert sorted(points) == sorted((name, step, float(step)) for name in "ab" for step in range(1, 101))


def test_files_folders_and_depth_are_bounded_and_names_may_be_anything(tmp_path):
    for number in range(event_files.MAX_FILES + 20):
        (tmp_path / f"{number}.tfevents").write_bytes(frame(scalar(f"t{number}", 1, 1).SerializeToString()))
    cursor = {}
    assert len(read(tmp_path, cursor)) == event_files.MAX_FILES
    for path in tmp_path.iterdir():
        path.rename(path.with_name(f"again.{path.name}"))
    read(tmp_path, cursor)
    assert len(cursor) == event_files.MAX_FILES, "the cursor has no room for files of other names"
    deep = tmp_path / "deep"
    folder = deep / "/".join("d" * 300)
    folder.mkdir(parents=True)
    (folder / "x.tfevents").write_bytes(frame(scalar("deep", 1, 1).SerializeToString()))
    wide = tmp_path / "wide"
    for number in range(event_files.MAX_FOLDERS + 50):
        (wide / str(number)).mkdir(parents=True)
    last = max(wide.iterdir())  # folders are visited in the order of their names
    (last / "x.tfevents").write_bytes(frame(scalar("wide", 1, 1).SerializeToString()))
    assert read(deep) == read(wide) == []


def test_a_read_is_limited_by_all_entries_and_not_by_the_useful_ones(tmp_path, monkeypatch):
    """Millions of other files would delay the watcher, which reads every run in turn."""
    monkeypatch.setattr(event_files, "MAX_ENTRIES", 50)
    for number in range(40):
        (tmp_path / "a" / str(number)).mkdir(parents=True)
        (tmp_path / f"other-{number}").touch()
    entries = []
    scan = os.scandir

    @contextlib.contextmanager
    def counting(place):
        with scan(place) as all_entries:
            yield (entries.append(entry) or entry for entry in all_entries)

    monkeypatch.setattr(event_files.os, "scandir", counting)
    assert read(tmp_path) == []
    assert len(entries) == 50


def test_values_out_of_range_are_skipped_or_bounded(customer, backend):
    """As in the metrics file, and with times and values that JSON does not have."""
    attempt = customer.started(nodes=1)
    stamps = (1e18, float("inf"), float("nan"), -5.0)
    events = [scalar("fine", number, 0.5) for number in range(len(stamps))]
    for event, stamp in zip(events, stamps, strict=True):
        event.wall_time = stamp
    odd = (scalar("far", 2**62, 0.5), scalar("nan", 1, float("nan")), scalar("bad\0tag", 1, 1), scalar("", 1, 1))
    write(backend.run_folder(attempt.run_name) / "run" / "tensorboard", *events, *odd)
    assert telemetry.ingest(attempt=attempt)
    assert selectors.metrics(attempt.job)[0] == {"fine": [[number, 0.5] for number in range(len(stamps))]}
    assert all(abs(point.at.timestamp() - time.time()) < 60 for point in MetricPoint.objects.all())
    assert telemetry.ingest(attempt=attempt) is False
