"""Mitigated models under torch.compile, in one graph or in several, and right in both.

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
from tests.models import build, run, tensors

model, inputs = build(sys.argv[3])
plain = tensors(run(model, inputs))
sw.mitigate(model, eval("sw." + sys.argv[1]))
found = tensors(run(model, inputs))
compiled = torch.compile(model, backend="eager", fullgraph=sys.argv[2] == "whole")
torch.testing.assert_close(tensors(run(compiled, inputs)), found)
assert not torch.equal(plain[0], found[0])
print("right")
"""


@pytest.mark.parametrize(
    ("mitigation", "graph", "name"),
    [
        ("Gate('elementwise', init='paper')", "whole", "timm-vit-sdpa"),
        ("Gate('headwise', init='paper')", "whole", "timm-vit-sdpa"),
        ("Gate('elementwise', init='paper')", "parts", "open_clip"),
        ("Gate('headwise', init='paper')", "parts", "nn-encoder-nested"),
        ("SinkLogits()", "whole", "timm-vit-sdpa"),
        ("SinkLogits('off-by-one')", "whole", "timm-vit-eager"),
        ("SinkLogits()", "whole", "llama-sdpa"),
        ("SinkLogits()", "parts", "open_clip"),
        ("SinkLogits()", "parts", "nn-encoder-nested"),
        ("Registers(3)", "parts", "timm-vit-sdpa"),
        ("RegisterNeurons(((1, 5),), prefix=1)", "parts", "timm-vit-sdpa"),
    ],
)
def test_compiled_and_not_are_the_same(mitigation, graph, name):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, mitigation, graph, name],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent.parent,
        timeout=300,
    )
    assert done.stdout == "right\n", done.stderr
