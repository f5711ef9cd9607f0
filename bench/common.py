"""What the benchmarks share: peak memory, and where a table goes."""

from collections.abc import Callable
from pathlib import Path

README = Path(__file__).parent / "README.md"


def peak_growth_mib(run: Callable[[], object], device: str) -> float:
    """MiB by which the process's peak (on a GPU: the allocator's) grows while `run` runs."""
    import torch

    if device.startswith("cuda"):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = _status_kib("VmRSS")
    run()
    return (_status_kib("VmHWM") - before) / 1024


def _status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}: peak memory is measured on Linux only")


def write_table(name: str, lines: list[str], file: Path = README) -> None:
    """Put a table between the markers `name` of a file."""
    head, start, tail = file.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    _, stop, rest = tail.partition(f"<!-- /{name} -->")
    if not start or not stop:
        raise RuntimeError(f"{file} has no place for the table {name}")
    table = "\n".join(lines)
    file.write_text(f"{head}{start}{table}\n{stop}{rest}", encoding="utf-8")
