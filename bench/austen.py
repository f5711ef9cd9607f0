"""A novel by Jane Austen as a text file, from the Debian package r-cran-janeaustenr.

    apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr_*.deb austen
    python bench/austen.py austen emma.txt          # the longest text in the package

R stores lazily loaded data as consecutive blocks: a length (4 bytes), a letter for the compression,
and data in XDR format. There a vector of strings has, per string, a tag, a length and its bytes.
"""

import lzma
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path


def blocks(packed: bytes) -> Iterator[bytes]:
    """The decompressed blocks of an .rdb file."""
    while packed:
        kind = packed[4:5]
        if kind == b"Z":
            machine = lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=[
                {"id": lzma.FILTER_LZMA2, "dict_size": 1 << 26}])  # fmt: skip
            yield machine.decompress(packed[5:])
            packed = machine.unused_data
        else:
            inflate = zlib.decompressobj()
            yield inflate.decompress(packed[4:])
            packed = inflate.unused_data


def lines(block: bytes) -> list[str]:
    """The longest vector of strings in a block of XDR data."""
    best: list[str] = []
    at = 0
    while (at := block.find(b"\x00\x00\x00\x10", at)) >= 0:
        count = struct.unpack(">i", block[at + 4 : at + 8])[0]
        here, found = at + 8, []
        while len(found) < count and block[here + 2 : here + 4] in (b"\x00\x09", b"\x80\x09"):
            size = struct.unpack(">i", block[here + 4 : here + 8])[0]
            found.append(block[here + 8 : here + 8 + size].decode("utf-8", "replace"))
            here += 8 + size
        best = max(best, found, key=len)
        at += 4
    return best


if __name__ == "__main__":
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    (database,) = folder.rglob("data/Rdata.rdb")
    novels = [lines(block) for block in blocks(database.read_bytes())]
    target.write_text("\n".join(max(novels, key=len)), encoding="utf-8")
