"""One thread a worker, so that two do not fight over two cores; no hub is asked for anything."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
