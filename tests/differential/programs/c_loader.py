#: sometimes: a fork while autoprof starts its helper inherits the helper's pipes, so autoprof waits for the child
#: captures: yes
#: slow:
#: needs: torch
"""DataLoader whose workers fork in a captured stage."""

import torch
from tinyrl import Trainer


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return Trainer().update(lambda: torch.tensor(index))


def work():
    loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2)
    return [batch.tolist() for batch in loader]


print(Trainer().fit(inside=work))
loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2, persistent_workers=True)
print([batch.tolist() for batch in loader], Trainer().fit(1, lambda: [batch.tolist() for batch in loader]))
