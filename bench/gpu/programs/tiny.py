"""A small language model with random weights, and its tokenizer of single bytes: nothing is downloaded."""

from __future__ import annotations

from typing import Any


def tokenizer() -> Any:
    """Return a tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token="<|end|>", pad_token="<|pad|>", padding_side="left"
    )


def model(tokens: Any, device: str) -> Any:
    """Return a Qwen2 with two layers on the CPU, with four on a GPU. The caller moves it to the device."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    width, layers = (64, 2) if device == "cpu" else (512, 4)
    made = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokens),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=tokens.eos_token_id,
            pad_token_id=tokens.pad_token_id,
        )
    )
    made.generation_config.pad_token_id = tokens.pad_token_id
    return made


def common(device: str, steps: int) -> dict[str, Any]:
    """Return arguments of every trainer: six steps, without files or reports."""
    return {
        "output_dir": "out",
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "use_cpu": device == "cpu",
        "bf16": False,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
        "learning_rate": 1e-3,
    }


# Parts of names in a log that depend on time.
_TIMED = ("time", "per_second", "runtime")


def history(trainer: Any) -> list[dict[str, Any]]:
    """Return a trainer's log without values that depend on time."""
    lines = trainer.state.log_history
    return [{key: value for key, value in line.items() if not any(word in key for word in _TIMED)} for line in lines]
