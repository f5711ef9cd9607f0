"""The processes of one command: Lightning Fabric starts them, and all end if one fails."""

import json
import logging
import os
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from sinkwise.errors import InputError, SinkwiseError

POLL_SECONDS = 0.1
"""How often a process checks whether another has failed."""
GRACE_SECONDS = 10.0
"""How long a failed process waits for the first one to report the failure and end it."""
WAIT = timedelta(days=1)
"""How long processes wait for each other."""


def check_processes(devices: int, nodes: int, device: str) -> None:
    """Raise InputError if this many processes cannot be started."""
    for name, value in (("--devices", devices), ("--num-nodes", nodes)):
        if value < 1:
            raise InputError(f"{name} must be at least 1; got {value}")
    if devices * nodes == 1:
        return
    if device not in ("cpu", "cuda"):
        raise InputError(f"--device must be cpu or cuda for several processes; got {device}")
    if device == "cuda":
        import torch

        there = torch.cuda.device_count()
        if devices > there:
            raise InputError(
                f"--devices must be at most {there}, the CUDA devices here; got {devices}"
            )
    if nodes > 1 and "MASTER_ADDR" not in os.environ and "SLURM_NTASKS" not in os.environ:
        raise InputError(
            f"--num-nodes {nodes} needs MASTER_ADDR and MASTER_PORT (of the first node) and "
            "NODE_RANK (0, 1, ...) in the environment; start the command on every node"
        )


class Group:
    """The processes of one command, as one of them sees it."""

    def __init__(self, rank: int, world: int, device: str, watch: "_Watch | None" = None) -> None:
        self.rank = rank
        self.world = world
        self.device = device
        self._watch = watch

    def wait(self) -> None:
        """Wait until all processes have arrived here; each may end on its own afterwards."""
        if self._watch is None:
            return
        import torch

        try:
            here: list[Any] = [None] * self.world
            torch.distributed.all_gather_object(here, self.rank)
        except RuntimeError as error:
            time.sleep(GRACE_SECONDS / 2)  # the watch knows the cause and ends this process
            raise InputError("another process ended before it was done") from error
        self._watch.over.set()


@contextmanager
def processes(
    devices: int, nodes: int, device: str, folder: Path, say: Callable[[str], None]
) -> Iterator[Group]:
    """Run the block in `devices` processes on each of `nodes` nodes; they share `folder`.

    Each process runs the whole command again up to this point, and all except the first end with
    the block. A single process is the calling one; Fabric is not imported then. If the block fails
    in one process, the others end too, and the first one reports the cause with `say` and exits
    with code 2. Raises InputError if the processes cannot be started.
    """
    if devices * nodes == 1:
        yield Group(0, 1, device)
        return
    watch = _Watch(folder, say, started="LOCAL_RANK" in os.environ)
    group = _started(devices, nodes, device, watch)
    watch.rank, watch.world = group.rank, group.world
    names: list[Any] = [secrets.token_hex(8)]
    try:
        import torch

        if group.rank == 0:
            for old in folder.glob("failed-*.json"):
                old.unlink(missing_ok=True)
        torch.distributed.broadcast_object_list(names, 0)
        watch.file = folder / f"failed-{names[0]}.json"
        yield group
    except BaseException as error:
        watch.failed(error)
        raise
    watch.finish()


def _started(devices: int, nodes: int, device: str, watch: "_Watch") -> Group:
    try:
        from lightning_fabric import Fabric
        from lightning_fabric.strategies import DDPStrategy
    except ImportError as error:
        raise InputError(
            "several processes need Lightning Fabric: pip install 'sinkwise[scale]'"
        ) from error
    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    try:
        # Results are exchanged on disk; gloo only synchronises, which is enough on GPUs too.
        strategy = DDPStrategy(process_group_backend="gloo", timeout=WAIT)
        fabric = Fabric(
            accelerator=device, devices=devices, num_nodes=nodes, strategy=strategy
        )  # fmt: skip
        watch.children = lambda: getattr(strategy.launcher, "procs", [])
        watch.start()
        with _stdout_to_stderr():  # gloo prints there
            fabric.launch()
    except (ValueError, RuntimeError) as error:
        watch.failed(error)
        raise InputError(f"the processes could not be started: {error}") from error
    return Group(fabric.global_rank, fabric.world_size, str(fabric.device), watch)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect what C++ code prints to stderr: a program may parse the command's output."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


class _Watch:
    """A thread that ends its process once another one has failed or its parent is gone.

    Ending at once is safe: files of finished batches are written atomically.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], started: bool) -> None:
        self.rank: int | None = None
        self.world = 0
        self.file: Path | None = None
        """The message of the process that failed first."""
        self.children: Callable[[], list[Any]] = list
        self.over = threading.Event()
        """Set once the other processes no longer matter."""
        self._folder = folder
        self._say = say
        self._parent = os.getppid() if started else None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start watching."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="sinkwise-watch")
        self._thread.start()

    def _run(self) -> None:
        while not self.over.wait(POLL_SECONDS):
            if self._parent is not None and os.getppid() != self._parent:
                os._exit(2)
            dead = [child for child in self.children() if child.poll() not in (None, 0)]
            if dead:
                code = dead[0].returncode
                how = f"by signal {-code}" if code < 0 else f"with code {code}"
                self._write(f"a process ended {how} before it was done")
                if self.file is None and not self.over.is_set():
                    self._end(f"a process ended {how} while the processes were started")
            if self.file is not None and self.file.exists() and not self.over.is_set():
                self._end(self._read(self.file))

    def _write(self, why: str) -> None:
        """Publish the failure to all processes, unless one has already."""
        if self.file is None:
            return
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(self.file, "x", encoding="utf-8") as file:
                file.write(json.dumps(" ".join(why.split())))

    @staticmethod
    def _read(file: Path) -> str:
        for _ in range(10):
            with suppress(OSError, ValueError):
                return json.loads(file.read_text(encoding="utf-8"))
            time.sleep(POLL_SECONDS)
        return "another process has failed"

    def _end(self, why: str) -> None:
        """End this process and its children."""
        if self.rank == 0 or (self.rank is None and self._parent is None):
            if sys.stderr.isatty():
                sys.stderr.write("\x1b[?25h")  # a progress bar hides the cursor
            self._say(why)
        else:
            time.sleep(GRACE_SECONDS / 2)  # the first process reports, then ends its children
        self._end_children()
        os._exit(2)

    def _end_children(self) -> None:
        children = self.children()
        for child in children:
            if child.poll() is None:
                child.kill()
        for child in children:
            child.wait()
        if self.file is not None and self.world == 1 + len(children):
            self.file.unlink(missing_ok=True)
            with suppress(OSError):
                self._folder.rmdir()

    def failed(self, error: BaseException) -> None:
        """The block failed in this process: end the others too. Returns if the error is to be
        raised; in a process that another one has started it does not return.
        """
        ours = isinstance(error, SinkwiseError)
        speaks = self.rank == 0 or (self.rank is None and self._parent is None)
        if speaks:
            self.over.set()
        elif not ours and not isinstance(error, KeyboardInterrupt):
            traceback.print_exception(error)
        if not isinstance(error, KeyboardInterrupt):
            self._write(str(error) if ours else f"{type(error).__name__}: {error}")
        if speaks:
            self._end_children()
        elif self.rank is not None:
            time.sleep(GRACE_SECONDS)
            os._exit(2)

    def finish(self) -> None:
        """The block is done: wait for the children. All processes except the first end here,
        since an interpreter that shuts down beside gloo's threads may abort.
        """
        for child in self.children():
            child.wait()
        self.over.set()
        if self.rank:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        if self._thread is not None:
            self._thread.join()
        import torch

        torch.distributed.destroy_process_group()
