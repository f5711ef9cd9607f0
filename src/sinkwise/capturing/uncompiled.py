"""Run a model eagerly although it is compiled: a compiled graph shows no attention calls."""

import sys
from typing import Any

import torch


class Uncompiled:
    """While entered, torch.compile has no effect.

    Nothing can be compiled before torch's compiler is loaded, which takes seconds. It is therefore
    switched off as soon as it is loaded, which may be in the middle of a forward pass.
    """

    def __init__(self) -> None:
        self._stance: Any = None

    def __enter__(self) -> None:
        self.switch_off()

    def __exit__(self, *error: object) -> None:
        if self._stance is not None:
            self._stance.__exit__(*error)
            self._stance = None

    def switch_off(self) -> None:
        """Make compiled functions run eagerly, once torch's compiler has been loaded."""
        if self._stance is not None:
            return
        compiler = sys.modules.get("torch._dynamo")
        if compiler is not None and not getattr(compiler.__spec__, "_initializing", False):
            self._stance = torch.compiler.set_stance("force_eager")
            self._stance.__enter__()
