"""Names that AReaL 1.0.4 imports from vLLM, which the vLLM of this environment (0.27) has in another place."""

import sys
from types import ModuleType

from wrapt import when_imported


@when_imported("vllm.entrypoints.openai.api_server")
def moved(module: ModuleType) -> None:
    from vllm.entrypoints.serve.utils import api_utils

    for name in ("vllm.entrypoints.openai.utils", "vllm.entrypoints.utils"):
        sys.modules.setdefault(name, api_utils)
