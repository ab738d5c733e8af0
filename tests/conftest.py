"""What holds for every test: no hub, and one thread: two that wait for each other on busy cores crawl.

Set in the environment before torch or the tokenizers are imported, so that subprocesses inherit it
and a test that needs no torch does not pay for it.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
