"""Maker of a run's assets: a tiny Qwen2 model with its tokenizer, and data.

    python make_assets.py OUTDIR

Everything is made here from fixed seeds; nothing is downloaded. The files go to ``OUTDIR/data``:
``model/``, ``train.parquet``, ``test.parquet`` and ``conversations.parquet``. The folder is built
under another name and renamed when it is complete, so an interrupted call leaves no incomplete folder.
It contains a stamp of this script, so a second call returns at once.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

STAMP = "stamp"
TRAIN_ROWS, TEST_ROWS = 64, 8
MAX_NUMBER = 30  # the task: add two numbers below this one
END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def question(a: int, b: int) -> str:
    """Return the text of one task."""
    return f"What is {a} plus {b}?"


def make_tokenizer(folder: Path) -> Any:
    """Train a byte-level BPE tokenizer on the tasks themselves and save it with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    numbers = range(MAX_NUMBER)
    corpus = [f"{question(a, b)} The answer is {a + b}." for a in numbers for b in numbers]
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[END_OF_TEXT, START_OF_TURN, END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[START_OF_TURN],
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_model(folder: Path, tokenizer: Any) -> None:
    """Save a Qwen2 with random weights, of the smallest shape that vLLM's CPU backend accepts.

    * 64 / 2 heads = head_dim 32, the smallest that its attention kernel has
      (``vllm/v1/attention/backends/cpu_attn.py``).
    * The vocabulary is exactly the tokenizer's: verl masks token ids beyond the tokenizer in vLLM
      but not in the actor, so padding rows would make the two disagree about log probabilities.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def make_data(path: Path, split: str, rows: int, rng: random.Random) -> None:
    """Write one split in the columns that verl's ``RLHFDataset`` and reward loop read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = []
    for index in range(rows):
        a, b = rng.randrange(MAX_NUMBER), rng.randrange(MAX_NUMBER)
        records.append(
            {
                "data_source": "toy/sums",
                "prompt": [{"role": "user", "content": question(a, b)}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"split": split, "index": index},
            }
        )
    pq.write_table(pa.Table.from_pylist(records), path)


def make_conversations(path: Path, rows: int, rng: random.Random) -> None:
    """Write the file that verl's SFT trainers read: a column of whole conversations."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = []
    for _ in range(rows):
        a, b = rng.randrange(MAX_NUMBER), rng.randrange(MAX_NUMBER)
        answer = {"role": "assistant", "content": f"The answer is {a + b}."}
        records.append({"messages": [{"role": "user", "content": question(a, b)}, answer]})
    pq.write_table(pa.Table.from_pylist(records), path)


def build(folder: Path) -> None:
    """Make all files in an existing, empty folder."""
    tokenizer = make_tokenizer(folder / "model")
    make_model(folder / "model", tokenizer)
    rng = random.Random(0)
    make_data(folder / "train.parquet", "train", TRAIN_ROWS, rng)
    make_data(folder / "test.parquet", "test", TEST_ROWS, rng)
    make_conversations(folder / "conversations.parquet", TRAIN_ROWS, rng)


def script_digest() -> str:
    """Return the content of the stamp: any change to this script makes existing files stale."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def is_complete(data: Path) -> bool:
    """Return True if ``data`` was made by this version of the script."""
    try:
        return (data / STAMP).read_text() == script_digest()
    except OSError:
        return False


def make_assets(outdir: Path) -> bool:
    """Make ``outdir/data`` unless it exists already. Return True if it was made."""
    data = outdir / "data"
    if is_complete(data):
        return False
    outdir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=outdir))
    try:
        new = scratch / "data"
        new.mkdir()
        build(new)
        (new / STAMP).write_text(script_digest())
        if data.exists():
            data.rename(scratch / "stale")
        try:
            new.rename(data)
        except OSError:
            if not is_complete(data):  # else another process was faster: its files are the same
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny model and the data of the CPU runs.")
    parser.add_argument("outdir", type=Path)
    outdir: Path = parser.parse_args().outdir
    made = make_assets(outdir)
    print(f"assets {'made' if made else 'found'} in {outdir}")


if __name__ == "__main__":
    main()
