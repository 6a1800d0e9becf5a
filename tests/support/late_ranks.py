"""One of two gloo ranks. Rank 1 misses an all_reduce or joins with another shape; each rank writes its flight record.

RANK=0 WORLD_SIZE=2 python late_ranks.py FOLDER missing|shape
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

_DEADLINE_S = 240.0


def there(path: Path) -> None:
    """Wait until a file exists, or for four minutes."""
    end = time.monotonic() + _DEADLINE_S
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)


def main(folder: Path, mode: str) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    if rank:
        # gloo ends a process that receives more data than it expects, so rank 0 must write its record first.
        there(folder / "record0")
    if not rank or mode == "shape":
        dist.all_reduce(torch.ones(8 if rank else 4), async_op=True)
    content = torch._C._distributed_c10d._dump_fr_trace()
    (folder / f"part{rank}").write_bytes(content)
    (folder / f"part{rank}").rename(folder / f"record{rank}")
    there(folder / "record1")
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
