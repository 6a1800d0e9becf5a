"""Critic without flash-attn for verl 0.9.1; one more module for VERL_USE_EXTERNAL_MODULES.

``load_valuehead_model`` (``verl/utils/model.py``) asks for flash attention by name and
ignores the configuration; it reports the failure as a missing value head. The FSDP engine looks the
function up when it builds the model, so replacing it at import is early enough.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
import verl.utils.model


def load_valuehead_model(
    local_path: str,
    torch_dtype: torch.dtype,
    model_config: transformers.PretrainedConfig,
    trust_remote_code: bool,
) -> Any:
    """Load the model as the first branch of verl's function does, with torch's own attention."""
    return transformers.AutoModelForTokenClassification.from_pretrained(
        pretrained_model_name_or_path=local_path,
        dtype=torch_dtype,
        config=model_config,
        attn_implementation="sdpa",
        trust_remote_code=trust_remote_code,
    )


verl.utils.model.load_valuehead_model = load_valuehead_model
