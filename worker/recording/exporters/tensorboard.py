"""TensorBoard: event files in a folder, which `tensorboard --logdir` shows, written without TensorBoard itself.

An event file is a sequence of records in TensorFlow's TFRecord framing, each of which is a protocol buffer
`tensorflow.Event` (tensorflow/core/util/event.proto, tensorflow/core/lib/io/record_writer.h).
"""

import math
import re
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from worker.recording.exporters.types import RunInfo
from worker.types import Ended

FILE_VERSION = b"brain.Event:2"
# Keys of fields: their number times 8, and the encoding of the value (0: varint, 1: 8 bytes, 2: with a length, 5: 4
# bytes).
EVENT_WALL_TIME, EVENT_STEP, EVENT_FILE_VERSION, EVENT_SUMMARY = 1 << 3 | 1, 2 << 3, 3 << 3 | 2, 5 << 3 | 2
SUMMARY_VALUE, VALUE_TAG, VALUE_SIMPLE = 1 << 3 | 2, 1 << 3 | 2, 2 << 3 | 5
# Of a file or folder, on the common filesystems of Linux.
MAX_NAME_BYTES = 255


class TensorBoardExporter:
    """`folder` gets a folder for each project and in it one for each run, whose name ends with the job's id. Each
    attempt of the job writes its own file; TensorBoard shows all files of a run as one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder
        self._end = 0  # of the file's complete records, in bytes

    def start(self, run_info: RunInfo) -> int | None:
        run = self.folder / _file_name(run_info.project) / _run_name(run_info)
        run.mkdir(parents=True, exist_ok=True)
        steps = [step for file in run.glob("events.out.tfevents.*") for step in recorded_steps(file)]
        self._file = run / f"events.out.tfevents.{time.time_ns()}"
        self._file.touch(exist_ok=False)
        self._end = 0
        self._append(_event(_key(EVENT_FILE_VERSION) + _with_length(FILE_VERSION)))
        return max(steps, default=None)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        values = b"".join(_value(name, value) for name, value in metrics.items() if name != "step")
        self._append(_event(_key(EVENT_STEP) + _varint(step) + _key(EVENT_SUMMARY) + _with_length(values)))

    def finish(self, ended: Ended) -> None:
        """Every step is written already."""

    def _append(self, event: bytes) -> None:
        """Add a record, in place of what a call that failed has left of one."""
        record = _record(event)
        with self._file.open("r+b") as file:
            file.seek(self._end)
            file.truncate()
            file.write(record)
        self._end += len(record)


def recorded_steps(file: Path) -> Iterator[int]:
    """The steps in an event file of this module, up to the first record that is not complete."""
    data = file.read_bytes()
    place = 0
    while place + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        event = data[place + 12 : place + 12 + length]
        place += 16 + length
        # The time has nine bytes, and the step follows in events that have one.
        if place <= len(data) and len(event) > 9 and event[9] == EVENT_STEP:
            yield _read_varint(event, 10)


def _run_name(run_info: RunInfo) -> str:
    if run_info.name == run_info.job_id:
        return run_info.job_id
    job = f"-{run_info.job_id}"
    return _file_name(run_info.name, MAX_NAME_BYTES - len(job)) + job


def _file_name(text: str, size: int = MAX_NAME_BYTES) -> str:
    """A text as a part of a path, with the letters of all languages, in at most `size` bytes."""
    name = re.sub(r"[^\w .-]+", "_", text).encode()[:size].decode(errors="ignore")
    return name if name.strip(".") else "_"


def _event(content: bytes) -> bytes:
    return _key(EVENT_WALL_TIME) + struct.pack("<d", time.time()) + content


def _value(name: str, value: float) -> bytes:
    """A metric in a summary. TensorBoard's values have 32 bits."""
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", math.copysign(math.inf, value))
    content = _key(VALUE_TAG) + _with_length(name.encode()) + _key(VALUE_SIMPLE) + packed
    return _key(SUMMARY_VALUE) + _with_length(content)


def _key(key: int) -> bytes:
    return bytes([key])


def _with_length(content: bytes) -> bytes:
    return _varint(len(content)) + content


def _varint(number: int) -> bytes:
    """A number that is not negative, seven bits a byte, the lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _read_varint(data: bytes, place: int) -> int:
    number = 0
    for shift, byte in enumerate(data[place:]):
        number |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            break
    return number


def _record(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    return length + _masked_crc(length) + event + _masked_crc(event)


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)  # CRC-32C, reflected
        table.append(byte)
    return tuple(table)


_CRC_TABLE = _crc_table()


def _masked_crc(data: bytes) -> bytes:
    """The checksum of a TFRecord: CRC-32C, rotated, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
