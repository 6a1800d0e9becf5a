#: functions: together
#: captures: yes
#: needs: torch
"""torch in captured steps: models, optimizers, compilers, modes and tracers."""

import gc
import hashlib
import io
import json
import sys
import weakref

import torch
from tinyrl import Trainer, evaluate
from torch.overrides import TorchFunctionMode
from torch.profiler import ExecutionTraceObserver
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint


#: slow:
def autograd():
    """Autograd functions, hooks on tensors, checkpointing and anomaly detection in captured stages."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            return value * 2

        @staticmethod
        def backward(context, gradient):
            return Trainer().update(lambda: gradient * 2)

    def work():
        value = torch.ones(3, requires_grad=True)
        value.register_hook(lambda gradient: gradient + 1)
        with torch.autograd.set_detect_anomaly(True):
            checkpoint(lambda each: Double.apply(each).sin(), value, use_reentrant=False).sum().backward()
        return value.grad.tolist(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    print(Trainer().fit(2, work))
    with torch.no_grad():
        print(Trainer().fit(1, torch.is_grad_enabled), Trainer().fit(1, torch.is_autocast_enabled))


def saving():
    """torch.save and torch.load of trainers, models and optimizers in captured stages: the same bytes."""
    torch._lazy_modules.discard("_inductor")  # or the first capture imports it, which takes longer than all else
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)

    def work():
        model(torch.ones(4)).sum().backward()
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "step": 1, "function": Trainer.update}, file)
        file.seek(0)
        torch.save(model.state_dict(), "model.pt")
        torch.load("model.pt")
        return hashlib.sha1(file.getvalue()).hexdigest(), torch.load(file, weights_only=False)[
            "function"
        ] is Trainer.update

    print(Trainer().fit(inside=work))
    torch.save(Trainer("saved"), "trainer.pt")
    print(torch.load("trainer.pt", weights_only=False).fit())


#: slow:
def compiled():
    """torch.compile of functions that call hooked ones, and of a module called in captured stages."""
    model = torch.nn.Linear(4, 4)
    compiled = torch.compile(model, backend="eager")
    function = torch.compile(lambda value: evaluate(lambda: value * 2) + 1, backend="eager")

    def work():
        return compiled(torch.zeros(2, 4)).shape, function(torch.ones(3)).tolist()

    print(Trainer().fit(3, work))
    print(torch._dynamo.utils.counters["stats"]["calls_captured"] > 0)


#: slow:
#: set: AUTOPROF_MODE=continuous
def continuous():
    """One capture for each whole step."""
    print(Trainer().fit(3, lambda: torch.ones(4).mm(torch.ones(4)) if False else torch.ones(4).sum().item()))
    try:
        Trainer().fit(1, lambda: 1 / 0)
    except ZeroDivisionError as error:
        print(error.__context__)


#: set: GLOO_SOCKET_IFNAME=lo
#: slow:
def distributed():
    """Process group of one rank in captured stages, and its end."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def work():
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        dist.barrier()
        return tensor.tolist()

    print(Trainer().fit(2, work))
    dist.destroy_process_group()
    print(dist.is_initialized())


#: slow:
#: set: AUTOPROF_CONTENTS=cpu,memory,shapes,stack,module,flops
def every_content():
    """Captures with all contents."""
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    print(Trainer().fit(2, lambda: round(model(torch.ones(2, 3, 16)).sum().item(), 3)))


#: slow:
#: ignore: (En|Dis)abling Execution Trace Observer
def execution_trace():
    """User's execution trace observer and memory snapshots of torch around captured steps."""
    observer = ExecutionTraceObserver().register_callback("trace.json")
    observer.start()
    print(Trainer().fit(2, lambda: torch.ones(3).add(1).sum().item()))
    observer.stop()
    observer.unregister_callback()
    print(sum(node["name"] == "aten::add" for node in json.load(open("trace.json"))["nodes"]))
    __import__("os").remove("trace.json")


def training():
    """Steps of an optimizer: losses and parameters are the same to the last bit."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    class Mine(Trainer):
        def generate(self, inside=None):
            return super().generate(lambda: setattr(self, "batch", torch.randn(32, 8)))

        def update(self, inside=None):
            return super().update(self.learn)

        def learn(self):
            loss = model(self.batch).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.item()

    print(Mine().fit(3), sum(parameter.sum().item() for parameter in model.parameters()), torch.get_rng_state().sum())


#: slow:
#: needs: transformers
def transformers_model():
    """Model of transformers, which loads its modules lazily, that generates in captured stages."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=32)).eval()

    def work():
        return model.generate(
            torch.ones(1, 3, dtype=torch.long), max_new_tokens=4, do_sample=False, pad_token_id=0
        ).tolist()

    print(Trainer().fit(2, work))


def torch_modes():
    """Modes and transforms of the program that see each operator, but none of autoprof's, around captured steps."""
    torch._lazy_modules.discard("_inductor")  # or the first capture imports it, which takes longer than all else

    class Dispatched(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls):
            return False  # or the first operator imports torch._dynamo

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            print("dispatched", function)
            return function(*args, **(kwargs or {}))

    class Called(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            print("called", getattr(function, "__name__", function))
            return function(*args, **(kwargs or {}))

    def step(x):
        return Trainer().train_step(lambda: x.mul(3).sum())

    x = torch.ones(2, requires_grad=True)
    for mode in (Dispatched(), Called(), torch.inference_mode(), torch.autograd.detect_anomaly(check_nan=True)):
        with mode:
            print(step(x).tolist())
    print(torch.func.vmap(step)(torch.ones(2, 2)))
    print(torch.jit.trace(step, torch.ones(2)).graph)


#: slow:
def torch_state():
    """Global state of torch after captures: threads, dtype, RNG, determinism, warnings, dispatch modes."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    def look():
        return (
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.initial_seed() == torch.initial_seed(),
            torch.are_deterministic_algorithms_enabled(),
            _get_current_dispatch_mode(),
            torch._C._autograd._profiler_enabled() if False else None,
            len(torch.overrides._get_current_function_mode_stack()),
            torch.is_warn_always_enabled(),
        )

    torch.manual_seed(1)
    print(look(), Trainer().fit(2, look), look(), torch.rand(3))
    print(torch.autograd.profiler._is_profiler_enabled)


#: slow:
def torch_tracing():
    """Tracers that record each operator around captured steps: their graphs contain none of autoprof's."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(x):
        return Trainer().train_step(lambda: x.mul(3).sum())

    print(torch.func.grad(step)(torch.ones(2)))
    print(make_fx(step)(torch.ones(2)).code)
    print(make_fx(step, tracing_mode="fake")(torch.ones(2)).code)
    with FakeTensorMode():
        print(step(torch.ones(2)))


#: slow:
def freed_tensors():
    """Tensors in and after captured stages, which are freed as early as without autoprof."""
    references = []

    class Batch(torch.Tensor):
        pass

    def work(batch=None):
        activation = torch.ones(64, 64) * 2
        references.append(weakref.ref(activation))
        storage = activation.untyped_storage()
        references.append(weakref.ref(storage))
        return None

    gc.disable()
    trainer = Trainer()
    for trainer.global_step in range(1, 4):
        batch = torch.ones(5).as_subclass(Batch)
        references.append(weakref.ref(batch))
        trainer.train_step(work)
        trainer.update(work, batch)
        del batch
        print([reference() is None for reference in references])


#: slow:
def collector():
    """Garbage collector in captured stages: it stays enabled and frozen as before, and frees objects in cycles."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)
            self.itself = [self]

    def work():
        model = Model()
        model(torch.ones(2)) if False else model.inner(torch.ones(2)).sum().backward()
        reference = weakref.ref(model)
        del model
        before = reference() is None
        gc.collect()
        return before, reference() is None, gc.isenabled(), gc.get_threshold()

    print(Trainer().fit(2, work))
    gc.disable()
    print(Trainer().fit(2, work), gc.isenabled())


for name in sys.argv[1].split(","):
    print(name)
    globals()[name]()
