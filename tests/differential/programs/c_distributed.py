#: set: GLOO_SOCKET_IFNAME=lo
#: captures: yes
#: slow:
#: needs: torch
"""Process group of one rank in captured stages, and its end."""

import torch
import torch.distributed as dist
from tinyrl import Trainer

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def work():
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.barrier()
    return tensor.tolist()


print(Trainer().fit(2, work))
dist.destroy_process_group()
print(dist.is_initialized())
