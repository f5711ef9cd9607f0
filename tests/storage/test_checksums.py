"""One checksum: of bytes, of text, and of pieces that are never joined."""

import hashlib

import pytest

from sinkwise.storage.checksums import checksum


@pytest.mark.parametrize("content", ["", "sink", "ω ≤ 2π", "x" * 100_000])
def test_text_bytes_and_pieces_agree(content):
    right = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
    middle = len(content) // 2
    assert checksum(content) == checksum(content.encode()) == right
    assert checksum([content[:middle], content[middle:].encode()]) == right
    assert checksum(character for character in content) == right
    assert checksum(content + " ") != right


def test_pieces_are_read_one_at_a_time():
    alive = 0

    class Piece(bytes):
        def __new__(cls):
            nonlocal alive
            alive += 1
            return super().__new__(cls, b"sink")

        def __del__(self):
            nonlocal alive
            alive -= 1

    most = 0

    def pieces():
        nonlocal most
        for _ in range(5):
            yield Piece()
            most = max(most, alive)

    assert checksum(pieces()) == checksum(b"sink" * 5)
    assert most <= 1
