"""The embedded demonstration: two trained models, one of each mechanism."""

from collections.abc import Iterator
from pathlib import Path

from sinkwise.hosts.load import load
from sinkwise.results import Scan, check_target
from sinkwise.scanning import scan
from sinkwise.synthetic.shipped import shipped

WORDS = {
    "nop": "\nModel `demo:nop` was trained to leave most tokens alone (conditional damping). Its "
    "head looks\nat token 0, whose value is near zero: an adaptive NOP.\n",
    "broadcast": "\nModel `demo:broadcast` was trained to tell everyone what one marked token says "
    "(global\nbroadcast). Layer 0 writes that token's payload to all; layer 1 has nothing left to "
    "add.\n",
}
"""What each model was trained to do."""


def run_demo(out: Path) -> Iterator[tuple[Scan, str]]:
    """Diagnose each shipped model; yields its scan and what the model is."""
    for name in WORDS:
        check_target(out / name)
    for name, words in WORDS.items():
        inputs = shipped(name)[1]
        yield scan(load(f"demo:{name}"), [inputs]), words
