"""torch.compile makes one graph of each module: no break, equal outputs and gradients."""

import subprocess
import sys
from pathlib import Path


def test_every_module_is_one_graph():
    script = Path(__file__).with_name("compiling.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "whole, inductor" in done.stdout and "broken" not in done.stdout
