"""Steps with an allocation that fails, and with one that takes much of the device's memory."""

from __future__ import annotations

from contextlib import suppress

import torch

import autoprof
from bench.gpu.programs.common import arguments, say, training

# Step that runs out of memory, and step that takes a share of it.
FAILS, FILLS = 3, 5
OutOfMemoryError: type[BaseException] = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)


def run_out(device: str, total: int) -> None:
    """Allocate twice the memory of the device."""
    if device == "cpu":
        raise OutOfMemoryError("planted: a machine without a GPU has no allocator that raises it")
    torch.empty(2 * total, dtype=torch.uint8, device=device)


def main() -> None:
    parsed = arguments(share=0.55, steps=7)
    device = parsed.device
    total = torch.cuda.get_device_properties(0).total_memory if device != "cpu" else 0
    step = training(device)
    failed, filled = 0, ""
    for number in range(1, parsed.steps + 1):
        with autoprof.step(number):
            with suppress(OutOfMemoryError), autoprof.stage("update_actor", role="actor"):
                step()
                if number == FAILS:
                    failed += 1
                    run_out(device, total)
                    failed -= 1
            if number == FILLS and device != "cpu":
                try:
                    torch.empty(int(parsed.share * total), dtype=torch.uint8, device=device)
                except OutOfMemoryError as error:
                    filled = str(error).partition("\n")[0]
                torch.cuda.empty_cache()
    say(failed=failed, filled=filled)


if __name__ == "__main__":
    main()
