"""Runs the command as a user does, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, "-m", "sinkwise"]
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def sinkwise(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `sinkwise` with these arguments in `cwd`."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**ENVIRONMENT, **environment},
        timeout=300,
    )
