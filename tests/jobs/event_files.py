"""TensorBoard's event files, written by its own writer."""

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


def scalar(tag, step, value):
    """Return an event with one scalar."""
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
    return Event(wall_time=1000.0 + step, step=step, summary=summary)


def write(folder, *events):
    """Write the events into a new event file in the folder."""
    writer = EventFileWriter(str(folder))
    for event in events:
        writer.add_event(event)
    writer.close()
