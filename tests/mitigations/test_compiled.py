"""Mitigated models under torch.compile: gates in one graph, registers in several, both right.

In a process of its own, as the types that tests check cannot be traced.
"""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
import sinkwise as sw
from tests.models import build

model, (x,) = build("timm-vit-sdpa")
plain = model(x)
sw.mitigate(model, eval("sw." + sys.argv[1]))
compiled = torch.compile(model, backend="eager", fullgraph=sys.argv[2] == "whole")
torch.testing.assert_close(compiled(x), model(x))
assert not torch.equal(plain, model(x))
print("right")
"""


@pytest.mark.parametrize(
    ("mitigation", "graph"),
    [
        ("Gate('elementwise', init='paper')", "whole"),
        ("Gate('headwise', init='paper')", "whole"),
        ("Registers(3)", "parts"),
        ("RegisterNeurons(((1, 5),), prefix=1)", "parts"),
    ],
)
def test_compiled_and_not_are_the_same(mitigation, graph):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, mitigation, graph],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent.parent,
        timeout=300,
    )
    assert done.stdout == "right\n", done.stderr
