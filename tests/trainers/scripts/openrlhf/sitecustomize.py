"""Stand-ins for the parts of CUDA that OpenRLHF uses, in every process of a run: device, optimizer, process group.

OpenRLHF's own code is unchanged. Weights reach the engines through a torch store instead of NCCL.
"""

import datetime
import importlib.machinery
import io
import sys
import types
from unittest import mock

import wrapt


class _Cpu(str):
    """Device for `tensor.to`, which formats as a number in `f"cuda:{device}"`."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return "0"


class _Group:
    """Process group that broadcasts between the trainer and the engines' workers."""

    def __init__(self, host: str, port: int, rank: int, world: int, device: object) -> None:
        import torch

        wait = datetime.timedelta(minutes=10)
        self._store = torch.distributed.TCPStore(host, port, is_master=rank == 0, timeout=wait, wait_for_workers=False)
        self._rank = rank
        self._sent = 0

    def broadcast(self, tensor, src, stream=None):
        import torch

        self._sent += 1
        if self._rank == src:
            content = io.BytesIO()
            torch.save(tensor.detach().clone(), content)
            self._store.set(f"tensor {self._sent}", content.getvalue())
        else:
            tensor.copy_(torch.load(io.BytesIO(self._store.get(f"tensor {self._sent}"))))


@wrapt.when_imported("torch")
def _torch(torch):
    cuda = torch.cuda
    cuda.current_device = lambda: _Cpu("cpu")
    cuda.current_stream = lambda *_: None
    for name in ("empty_cache", "set_device", "synchronize", "manual_seed_all", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *_, **__: None)


@wrapt.when_imported("openrlhf")
def _no_flash_attention(openrlhf):
    # OpenRLHF imports these names, but calls them only with packed samples.
    for name, members in {
        "flash_attn": (),
        "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
        "flash_attn.utils": (),
        "flash_attn.utils.distributed": ("all_gather",),
    }.items():
        module = sys.modules[name] = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(dict.fromkeys(members))


@wrapt.when_imported("openrlhf.models.ring_attn_utils")
def _flash_attention_was_not_there(ring_attn_utils):
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]


@wrapt.when_imported("deepspeed.ops.adam")
def _plain_adam(adam):
    import torch

    class FusedAdam(torch.optim.AdamW):
        def __init__(self, params, adam_w_mode=True, bias_correction=True, **options):
            super().__init__(params, **options)

    adam.FusedAdam = FusedAdam


@wrapt.when_imported("deepspeed.comm.torch")
def _no_compiler(comm):
    # DeepSpeed would compile the operator, which takes a minute.
    comm.build_shm_op = lambda: None


@wrapt.when_imported("openrlhf.utils.deepspeed.deepspeed")
def _mesh(deepspeed):
    whole = deepspeed.init_device_mesh
    deepspeed.init_device_mesh = lambda kind, *args, **kwargs: whole("cpu", *args, **kwargs)


@wrapt.when_imported("openrlhf.utils.distributed_util")
def _group(distributed):
    distributed.stateless_init_process_group = _Group


@wrapt.when_imported("openrlhf.trainer.ppo_utils.replay_buffer")
def _buffer(replay_buffer):
    import torch

    replay_buffer.torch = types.SimpleNamespace(**vars(torch))
    replay_buffer.torch.device = lambda _: torch.device("cpu")


@wrapt.when_imported("openrlhf.trainer.ray.vllm_worker_wrap")
def _worker(vllm_worker_wrap):
    whole = vllm_worker_wrap.WorkerWrap.update_weight

    def update_weight(self, *args, **kwargs):
        import torch

        # update_weight allocates memory on the device `cuda`.
        empty = torch.empty
        with mock.patch.object(torch, "empty", lambda shape, dtype, device: empty(shape, dtype=dtype)):
            return whole(self, *args, **kwargs)

    vllm_worker_wrap.WorkerWrap.update_weight = update_weight
