"""Engine with more requests than it runs at a time, until its scheduler has written its stacks and its state.

busy.py vllm|sglang MODEL: requests the stacks of all processes of the run, and prints their answers.
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
        # Workers and the scheduler run in separate processes, as with several GPUs.
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


def answers(processes):
    """Return the answers, or an empty list until `processes` of them exist and one has the state of an engine."""
    found = [json.loads(path.read_text()) for path in ASKED.glob("*.json")]
    return found if len(found) >= processes and any(each.get("engine") for each in found) else []


def main():
    generate = {"vllm": vllm, "sglang": sglang}[sys.argv[1]](sys.argv[2])
    generate(1)
    ASKED.mkdir(parents=True)
    deadline = time.monotonic() + DEADLINE_S
    # vLLM: this process, the scheduler and the worker.
    processes = {"vllm": 3, "sglang": 1}[sys.argv[1]]
    while not answers(processes) and time.monotonic() < deadline:
        generate(REQUESTS)
    print("RESULT " + json.dumps(answers(1)), flush=True)


if __name__ == "__main__":
    main()
