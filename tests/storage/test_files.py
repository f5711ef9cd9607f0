"""Files are whole or not there, and as readable as any other file of the user's."""

import os

import pytest

from sinkwise.errors import InputError
from sinkwise.storage.files import write_bytes


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_mode_follows_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_bytes(tmp_path / "file", b"content")
        assert os.umask(umask) == umask, "the umask is as it was"
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode
    assert (tmp_path / "file").read_bytes() == b"content"


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(InputError, match="taken' could not be written"):
        write_bytes(tmp_path / "taken", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
