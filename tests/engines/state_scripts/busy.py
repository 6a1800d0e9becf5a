"""An engine that has more requests than it runs at a time, till its scheduler has said where it stands.

busy.py vllm|sglang MODEL: asks all processes of the run, and prints what they said.
"""

import json
import sys
import time
from pathlib import Path

PROMPT = [5, 6, 7]
REQUESTS, TOKENS, AT_A_TIME = 100, 50, 4
ASKED = Path("autoprof_runs/latest/stacks/asked")
DEADLINE_S = 120


def vllm(model):
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=AT_A_TIME,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=33554432,
        # Workers have processes of their own, and the scheduler has one, as on several GPUs.
        distributed_executor_backend="mp",
    )
    parameters = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    return lambda requests: llm.generate([{"prompt_token_ids": PROMPT}] * requests, parameters, use_tqdm=False)


def sglang(model):
    import sglang

    engine = sglang.Engine(
        model_path=model,
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        dtype="float32",
        mem_fraction_static=0.1,
        max_total_tokens=1024,
        max_running_requests=AT_A_TIME,
        log_level="warning",
    )
    parameters = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    return lambda requests: engine.generate(input_ids=[PROMPT] * requests, sampling_params=parameters)


def told(processes):
    """Read the files; none before so many processes have written theirs, and one of them has an engine."""
    found = [json.loads(path.read_text()) for path in ASKED.glob("*.json")]
    return found if len(found) >= processes and any(each.get("engine") for each in found) else []


def main():
    generate = {"vllm": vllm, "sglang": sglang}[sys.argv[1]](sys.argv[2])
    generate(1)
    ASKED.mkdir(parents=True)
    deadline = time.monotonic() + DEADLINE_S
    # This one, the scheduler's, and with vLLM that of the worker.
    processes = {"vllm": 3, "sglang": 1}[sys.argv[1]]
    while not told(processes) and time.monotonic() < deadline:
        generate(REQUESTS)
    print("RESULT " + json.dumps(told(1)), flush=True)


if __name__ == "__main__":
    main()
