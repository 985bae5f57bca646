"""Write an event file of TensorBoard in the thread that calls.

    file = EventFile(dump_folder / "tb", purge_step=None)
    file.add(scalar("loss", 6.9), step=10)          # torch.utils.tensorboard.summary
    file.flush()                                    # on disk, or OSError

The writer of torch.utils.tensorboard has a thread, which prints a traceback where a disk is full.
"""

import os
import socket
import time
from pathlib import Path
from typing import Any

VERSION = "brain.Event:2"


class EventFile:
    """A new event file. Methods raise OSError.

    purge_step: the first step of a resumed run, from which on TensorBoard hides older values.
    """

    def __init__(self, folder: Path, purge_step: int | None):
        # slow to import, and only one rank needs it
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        place = f"{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        path = folder / f"events.out.tfevents.{int(time.time()):010d}.{place}"
        self.records = RecordWriter(open(path, "xb"))  # noqa: SIM115  `close` closes it
        self._write(file_version=VERSION)
        if purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._write(step=purge_step, session_log=start)
        self.flush()

    def add(self, summary: Any, step: int | None = None) -> None:  # noqa: ANN401 a protocol buffer
        """Add a summary. step: None for one of all steps."""
        self._write(summary=summary, **({} if step is None else {"step": step}))

    def flush(self) -> None:
        self.records.flush()

    def close(self) -> None:
        self.records.close()

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.records.write(Event(wall_time=time.time(), **fields).SerializeToString())
