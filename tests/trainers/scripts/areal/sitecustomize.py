"""Two things that AReaL 1.0.4 expects of vLLM, where that of this environment (0.27, for CPUs) differs."""

import sys
from typing import Any

from wrapt import when_imported


@when_imported("vllm.entrypoints.openai.api_server")
def moved(module: Any) -> None:
    """Names that AReaL imports have another place."""
    from vllm.entrypoints.serve.utils import api_utils

    for name in ("vllm.entrypoints.openai.utils", "vllm.entrypoints.utils"):
        sys.modules.setdefault(name, api_utils)


@when_imported("vllm.model_executor.layers.utils")
def plain_weights(module: Any) -> None:
    """A CPU's linear layers pack their weights and drop them, and then no others can be loaded into the engine."""

    def dispatch(layer: Any, remove_weight: bool) -> None:
        from torch.nn.functional import linear

        layer.cpu_linear = linear

    module.dispatch_cpu_unquantized_gemm = dispatch
