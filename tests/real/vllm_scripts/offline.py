"""User script with vLLM's `LLM`: offline.py MODEL apart|here [FOLDER]

With `here`, the engine and its worker run in this process. With FOLDER, vLLM's own profiler is configured.
"""

import json
import statistics
import sys
import time

from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams

PROMPT = {"prompt_token_ids": [5, 6, 7]}


def main():
    model, where, *folder = sys.argv[1:]
    more = {}
    if where == "here":
        more["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    if folder:
        more["profiler_config"] = {"profiler": "torch", "torch_profiler_dir": folder[0]}
    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=33554432,
        **more,
    )
    said = {}

    def generate(tokens=6, prompts=1):
        parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = llm.generate([PROMPT] * prompts, parameters, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def users_own(method):
        try:
            method()
        except Exception as error:
            return type(error).__name__
        return "ok"

    said["batches"] = [generate() for _ in range(3)]
    said["three at once"] = generate(12, prompts=3)
    said["chat"] = len(llm.chat([{"role": "user", "content": "a"}], SamplingParams(max_tokens=2), use_tqdm=False))
    llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True))
    said["seventh"] = generate()
    # In the eighth call, the user profiles.
    said["user start"] = users_own(llm.start_profile)
    said["eighth"] = generate()
    said["user stop"] = users_own(llm.stop_profile)
    said["ninth"] = generate()
    try:
        # vLLM refuses the second prompt and cancels the first.
        llm.generate([PROMPT, {"prompt_token_ids": [5] * 100}], SamplingParams(max_tokens=2), use_tqdm=False)
    except Exception as error:
        said["refused"] = "maximum context length" in str(error)
    said["last"] = generate()
    # Calls from the twelfth on: six normal ones, one that takes far longer than they took, and another normal one.
    took_s = []
    for _ in range(6):
        began_s = time.monotonic()
        generate()
        took_s.append(time.monotonic() - began_s)
    engine_step = llm.llm_engine.step

    def slow_step():
        llm.llm_engine.step = engine_step
        time.sleep(150 * statistics.median(took_s))
        return engine_step()

    llm.llm_engine.step = slow_step
    generate()
    generate()
    print("RESULT " + json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
