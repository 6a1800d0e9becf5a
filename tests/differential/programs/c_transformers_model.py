#: captures: yes
#: slow:
#: needs: torch
#: needs: transformers
"""Model of transformers, which loads its modules lazily, that generates in captured stages."""

import torch
from tinyrl import Trainer
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=32)).eval()


def work():
    return model.generate(
        torch.ones(1, 3, dtype=torch.long), max_new_tokens=4, do_sample=False, pad_token_id=0
    ).tolist()


print(Trainer().fit(2, work))
