"""Settings of the whole suite: offline, one thread a worker, nothing written outside temporary folders."""

from __future__ import annotations

import os

# Before anything imports torch. Two workers with all threads each would spend their time waiting for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
