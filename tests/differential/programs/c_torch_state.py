#: captures: yes
#: slow:
#: needs: torch
"""Global state of torch after captures: threads, dtype, RNG, determinism, warnings, dispatch modes."""

import torch
from tinyrl import Trainer
from torch.utils._python_dispatch import _get_current_dispatch_mode

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
