#: captures: yes
#: needs: torch
"""torch.save and torch.load of trainers, models and optimizers in captured stages: the same bytes."""

import hashlib
import io

import torch

torch._lazy_modules.discard("_inductor")  # or the first capture imports it, which takes longer than all else
from tinyrl import Trainer

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)


def work():
    model(torch.ones(4)).sum().backward()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "step": 1, "function": Trainer.update}, file)
    file.seek(0)
    torch.save(model.state_dict(), "model.pt")
    torch.load("model.pt")
    return hashlib.sha1(file.getvalue()).hexdigest(), torch.load(file, weights_only=False)["function"] is Trainer.update


print(Trainer().fit(inside=work))
torch.save(Trainer("saved"), "trainer.pt")
print(torch.load("trainer.pt", weights_only=False).fit())
