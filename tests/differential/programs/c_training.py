#: captures: yes
#: needs: torch
"""Steps of an optimizer: losses and parameters are the same to the last bit."""

import torch
from tinyrl import Trainer

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


class Mine(Trainer):
    def generate(self, inside=None):
        return super().generate(lambda: setattr(self, "batch", torch.randn(32, 8)))

    def update(self, inside=None):
        return super().update(self.learn)

    def learn(self):
        loss = model(self.batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()


print(Mine().fit(3), sum(parameter.sum().item() for parameter in model.parameters()), torch.get_rng_state().sum())
