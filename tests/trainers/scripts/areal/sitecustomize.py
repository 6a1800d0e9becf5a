"""Patches for two differences between vLLM 0.27 for CPUs and the release that AReaL 1.0.4 expects."""

import sys
from typing import Any

from wrapt import when_imported


@when_imported("vllm.entrypoints.openai.api_server")
def moved(module: Any) -> None:
    """Provide modules that AReaL imports under their old names."""
    from vllm.entrypoints.serve.utils import api_utils

    for name in ("vllm.entrypoints.openai.utils", "vllm.entrypoints.utils"):
        sys.modules.setdefault(name, api_utils)


@when_imported("vllm.model_executor.layers.utils")
def plain_weights(module: Any) -> None:
    """Keep the weights of linear layers.

    On a CPU, vLLM packs and drops them, and then can't load other weights.
    """

    def dispatch(layer: Any, remove_weight: bool) -> None:
        from torch.nn.functional import linear

        layer.cpu_linear = linear

    module.dispatch_cpu_unquantized_gemm = dispatch
