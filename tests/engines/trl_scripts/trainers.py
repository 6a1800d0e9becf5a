"""Script that runs trainers of TRL and transformers on the CPU one after the other: `trainers.py NAME...`

The last line of its output is JSON with the log of each trainer, and the imported modules of autoprof. The script makes
the model, which has two layers and random weights, and its tokenizer of single bytes.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

COMMON = {
    "output_dir": "out",
    "max_steps": 4,
    "per_device_train_batch_size": 4,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "seed": 0,
    "learning_rate": 1e-3,
}
EACH_STEP = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
GENERATES = {"num_generations": 4, "max_completion_length": 8, "beta": 0.0}


# Keys of the log that depend on time.
TIMED = re.compile("time|per_second", re.IGNORECASE)


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token="<|end|>", pad_token="<|pad|>", padding_side="left"
    )


def model(tokens: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    made = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokens),
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=2,
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


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


def rows(column: str) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{column: f"say {number}"} for number in range(64)])


def grpo(kind: Any = None, reward_funcs: Any = reward, peft_config: Any = None, **arguments: Any) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    tokens = tokenizer()
    return (kind or GRPOTrainer)(
        model=model(tokens),
        processing_class=tokens,
        reward_funcs=reward_funcs,
        args=GRPOConfig(**COMMON | GENERATES | arguments),
        train_dataset=rows("prompt"),
        eval_dataset=rows("prompt").select(range(4)),
        peft_config=peft_config,
    )


def accumulated() -> Any:
    """Return a trainer with two micro batches per step and four per generation: every other step does not generate."""
    return grpo(gradient_accumulation_steps=2, steps_per_generation=4)


def scored() -> Any:
    """Return a trainer with two steps per generation, which computes log probs before the first; it also evaluates."""
    return grpo(steps_per_generation=2, num_iterations=2, eval_strategy="steps", eval_steps=2, eval_on_start=True)


def checkpointed() -> Any:
    """Return a trainer with gradient checkpointing, which evaluates and saves each step."""
    return grpo(gradient_checkpointing=True, output_dir="out/checkpointed", **EACH_STEP)


def resumed() -> Any:
    """Return a trainer that resumes from the second step of `checkpointed`."""
    return checkpointed()


def adapted() -> Any:
    """Return a trainer with gradient checkpointing that trains and saves only the weights of an adapter of PEFT."""
    from peft import LoraConfig

    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return grpo(gradient_checkpointing=True, peft_config=adapter, output_dir="out/adapted", **EACH_STEP)


def compiled() -> Any:
    """Return a trainer with torch.compile, which evaluates and saves each step."""
    return grpo(torch_compile=True, output_dir="out/compiled", **EACH_STEP)


def slowed() -> Any:
    """Return a trainer of twelve steps, the ninth of which has a slow reward."""
    calls = itertools.count(1)

    def slow_reward(completions: list[str], **_: Any) -> list[float]:
        if next(calls) == 9:
            time.sleep(8)
        return reward(completions)

    return grpo(reward_funcs=slow_reward, max_steps=12)


def late() -> Any:
    """Return a trainer in whose third step rank 1 waits in its reward until both ranks have written their stacks."""
    calls = itertools.count(1)

    def fetch_score() -> None:
        deadline = time.monotonic() + 150
        while time.monotonic() < deadline:
            if len(list(Path("autoprof_runs").glob("2*/hangs/step_000003/*-[0-9]*.json"))) == 2:
                return
            time.sleep(0.1)

    def late_reward(completions: list[str], **_: Any) -> list[float]:
        if next(calls) == 3 and os.environ["RANK"] == "1":
            fetch_score()
        return reward(completions)

    return grpo(reward_funcs=late_reward, ddp_backend="gloo")


def killed() -> Any:
    """Return a trainer in whose third step rank 1 is killed in its reward."""
    calls = itertools.count(1)

    def last_reward(completions: list[str], **_: Any) -> list[float]:
        if next(calls) == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return reward(completions)

    return grpo(reward_funcs=last_reward, ddp_backend="gloo")


def colocated() -> Any:
    """Return a trainer with vLLM in its process; it evaluates before the first step, and every two steps."""
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation.vllm_generation import VLLMGeneration

    # vLLM on the CPU repacks its weights when it loads them, and can't load other weights later.
    VLLMGeneration.sync_weights = lambda self: None
    tokens = tokenizer()
    model(tokens).save_pretrained("model")
    tokens.save_pretrained("model")
    memory = {"vllm_gpu_memory_utilization": 0.2, "vllm_max_model_length": 64}
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    arguments = COMMON | GENERATES | memory | evaluation | {"use_vllm": True, "vllm_mode": "colocate"}
    return GRPOTrainer(
        model="model",
        reward_funcs=reward,
        args=GRPOConfig(**arguments),
        train_dataset=rows("prompt"),
        eval_dataset=rows("prompt").select(range(4)),
    )


def served() -> Any:
    """Return a trainer with a vLLM server at SERVER, which serves the model MODEL; it evaluates like `colocated`."""
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration

    # TRL would send new weights through NCCL, which needs a GPU.
    VLLMClient.init_communicator = lambda self, device: None
    VLLMGeneration.sync_weights = lambda self: None
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": os.environ["SERVER"]}
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    return GRPOTrainer(
        model=os.environ["MODEL"],
        reward_funcs=reward,
        args=GRPOConfig(**COMMON | GENERATES | evaluation | server),
        train_dataset=rows("prompt"),
        eval_dataset=rows("prompt").select(range(4)),
    )


def failing() -> Any:
    from trl import GRPOTrainer

    class FailingTrainer(GRPOTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 1:
                raise KeyError("the user's own")
            return super().compute_loss(*args, **kwargs)

    return grpo(FailingTrainer)


def rloo() -> Any:
    from trl import RLOOConfig, RLOOTrainer

    tokens = tokenizer()
    return RLOOTrainer(
        model=model(tokens),
        processing_class=tokens,
        reward_funcs=reward,
        args=RLOOConfig(**COMMON | GENERATES),
        train_dataset=rows("prompt"),
    )


def sft() -> Any:
    from trl import SFTConfig, SFTTrainer

    tokens = tokenizer()
    return SFTTrainer(
        model=model(tokens), processing_class=tokens, args=SFTConfig(**COMMON), train_dataset=rows("text")
    )


def plain() -> Any:
    """Return transformers' own Trainer, which evaluates and saves every two steps."""
    tokens = tokenizer()
    examples = [{"input_ids": torch.arange(n, n + 16), "labels": torch.arange(n, n + 16)} for n in range(64)]
    second = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    gloo = {"ddp_backend": "gloo"} if "RANK" in os.environ else {}
    return Trainer(
        model=model(tokens),
        args=TrainingArguments(**COMMON | second | gloo),
        train_dataset=examples,
        eval_dataset=examples[:4],
    )


MADE = (
    grpo,
    checkpointed,
    resumed,
    adapted,
    compiled,
    accumulated,
    scored,
    slowed,
    late,
    killed,
    colocated,
    served,
    failing,
    rloo,
    sft,
    plain,
)
RESUMED = {"resumed": "out/checkpointed/checkpoint-2"}
TRAINERS = {made.__name__: made for made in MADE}


def main() -> None:
    said: dict[str, Any] = {}
    for name in sys.argv[1:]:
        trainer = TRAINERS[name]()
        try:
            trainer.train(resume_from_checkpoint=RESUMED.get(name))
        except KeyError as error:
            said["raised"] = repr(error)
        history = trainer.state.log_history
        said[name] = [{key: value for key, value in line.items() if not TIMED.search(key)} for line in history]
        said.setdefault("timed", {})[name] = [{key: line[key] for key in line if TIMED.search(key)} for line in history]
        said["global_step"] = trainer.state.global_step
    said["autoprof"] = sorted(module for module in sys.modules if module.partition(".")[0] == "autoprof")
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(said), flush=True)
    if torch.distributed.is_initialized():
        # Without this pause, torch 2.13 sometimes hangs: the end of a process group holds the GIL while it waits for
        # gloo's thread, which needs the GIL to free the last collective (ProcessGroupGloo::~ProcessGroupGloo).
        time.sleep(0.5)
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
