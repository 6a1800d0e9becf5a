"""vLLM's `LLM` with random weights: four batches."""

from __future__ import annotations

from bench.gpu.programs import tiny
from bench.gpu.programs.common import arguments, say


def main() -> None:
    parsed = arguments(model="model")
    from vllm import LLM, SamplingParams

    tokens = tiny.tokenizer()
    tiny.model(tokens, "cuda").save_pretrained(parsed.model)
    tokens.save_pretrained(parsed.model)
    engine = LLM(
        model=parsed.model, enforce_eager=True, max_model_len=128, max_num_seqs=4, gpu_memory_utilization=0.3, seed=0
    )
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    prompt = {"prompt_token_ids": [5, 6, 7]}
    answers = [
        [list(each.outputs[0].token_ids) for each in engine.generate([prompt] * 4, sampling, use_tqdm=False)]
        for _ in range(4)
    ]
    say(tokens=sum(len(one) for batch in answers for one in batch))


if __name__ == "__main__":
    main()
