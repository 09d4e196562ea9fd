"""A checkpoint is there when its manifest is, and that is written last, once."""

import json

import pytest

from core.blobs import BlobExists, FolderBlobs
from worker.checkpoints import Checkpoints, model_name
from worker.refusals import InvalidModel


class Weights:
    """Saves and loads what it was given."""

    def __init__(self, **files):
        self.files = files

    def save(self, folder):
        for name, data in self.files.items():
            (folder / name).write_bytes(data)

    def load(self, folder):
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}


class Recording(FolderBlobs):
    """Notes what is put, and with what condition."""

    def __init__(self, root):
        super().__init__(root)
        self.puts = []

    def put_stream(self, key, chunks, *, if_absent=False):
        self.puts.append((key.rpartition("/")[2], if_absent))
        return super().put_stream(key, chunks, if_absent=if_absent)


@pytest.fixture
def checkpoints(bench):
    blobs = Recording(bench.tmp_path / "blobs")
    return Checkpoints(bench.database, blobs, bench.claim, bench.job(), bench.tmp_path, bench.patience)


def save(checkpoints, weights, step=2):
    checkpoints.save(weights, step=step, valid_reward=None, metrics={})


def test_the_manifest_is_put_last_and_only_where_there_is_none(checkpoints):
    save(checkpoints, Weights(adapter=b"a", zeros=b"z"))

    assert checkpoints.blobs.puts == [("adapter", False), ("zeros", False), ("manifest.json", True)]


def manifest_of(checkpoints):
    [key] = [key for key in checkpoints.blobs.list("projects/") if key.endswith("manifest.json")]
    return key


def test_a_manifest_that_is_there_already_and_says_the_same_is_fine(bench, checkpoints):
    """The attempt wrote it, and could not say so: the database was away."""
    key = written_without_row(bench, checkpoints, Weights(adapter=b"a"))
    before = checkpoints.blobs.read(key)

    save(checkpoints, Weights(adapter=b"a"))

    restored = Weights()
    assert checkpoints.restore(restored) == 2
    assert restored.files == {"adapter": b"a"}
    assert checkpoints.blobs.read(key) == before


def test_a_manifest_that_says_something_else_is_not_overruled(bench, checkpoints):
    key = written_without_row(bench, checkpoints, Weights(adapter=b"a"))

    with pytest.raises(BlobExists):
        save(checkpoints, Weights(adapter=b"b"))

    assert bench.checkpoints() == []
    assert json.loads(checkpoints.blobs.read(key))["files"][0]["bytes"] == 1


def written_without_row(bench, checkpoints, weights):
    save(checkpoints, weights)
    with bench.database.write() as session:
        for row in bench.checkpoints():
            session.delete(session.merge(row))
    return manifest_of(checkpoints)


def test_a_store_that_fails_before_the_manifest_leaves_no_checkpoint(bench, checkpoints):
    class Full(Recording):
        def put_stream(self, key, chunks, *, if_absent=False):
            if key.endswith("zeros"):
                raise OSError("no space left")
            return super().put_stream(key, chunks, if_absent=if_absent)

    checkpoints.blobs = Full(bench.tmp_path / "blobs")
    with pytest.raises(OSError, match="no space left"):
        save(checkpoints, Weights(adapter=b"a", zeros=b"z"))

    assert bench.checkpoints() == []
    assert [key.rpartition("/")[2] for key in checkpoints.blobs.list("projects/")] == ["adapter"]


def test_a_checkpoint_whose_manifest_is_gone_is_not_loaded(checkpoints):
    save(checkpoints, Weights(adapter=b"a"))
    checkpoints.blobs.delete(manifest_of(checkpoints))

    with pytest.raises(InvalidModel, match=r"damaged.*manifest\.json"):
        checkpoints.restore(Weights())


@pytest.mark.parametrize(
    ("suffix", "segment"),
    [
        ("desk v1.2", "desk-v1-2"),
        ("colours_2", "colours_2"),
        ("..", ""),
        ("ü/ß", ""),
        ("a:b/c", "a-b-c"),
        (None, ""),
    ],
)
def test_a_suffix_is_one_plain_segment_of_the_models_name(bench, suffix, segment):
    job = bench.job()
    job.suffix = suffix

    with bench.database.read() as session:
        name = model_name(session, job)

    assert name.split(":")[3] == segment
    assert len(name.split(":")) == 5
