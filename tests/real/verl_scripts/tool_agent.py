"""Run of verl's own ToolAgentLoop with a server whose answers call tools: tool_agent.py MODEL

One of four samples calls a slow tool. Only the engine and the postprocessing are fakes.
"""

import asyncio
import sys
from types import SimpleNamespace

from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop  # registers "tool_agent"
from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY, function_tool
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

SLOW_S = 0.5
SAMPLES = 4


@function_tool("search")
async def search(query: str) -> str:
    """Search.

    Args:
        query: Search terms.
    """
    await asyncio.sleep(0.01)
    return "found"


@function_tool("crawl")
async def crawl(query: str) -> str:
    """Search slowly.

    Args:
        query: Search terms.
    """
    await asyncio.sleep(SLOW_S)
    return "found at last"


@function_tool("broken")
async def broken(query: str) -> str:
    """Fail.

    Args:
        query: Search terms.
    """
    raise RuntimeError("out of order")


class Server:
    """Server that answers each turn with the next tool calls of the conversation, then with text."""

    def __init__(self, tokenizer, calls):
        self.tokenizer, self.calls = tokenizer, calls
        self.generate = SimpleNamespace(remote=self.answer)

    async def answer(self, **_):
        await asyncio.sleep(0.01)
        call = '<tool_call>{{"name": "{}", "arguments": {{"query": "a secret question"}}}}</tool_call>'
        text = "".join(call.format(name) for name in self.calls.pop(0)) if self.calls else "4"
        return TokenOutput(token_ids=[*self.tokenizer.encode(text), self.tokenizer.eos_token_id])


class Client(LLMServerClient):
    """verl's client without Ray."""

    def __init__(self, config, tokenizer, calls):
        super().__init__(config)
        self.server = Server(tokenizer, calls)

    async def _acquire_server(self, request_id, **extra):
        return "server", self.server

    def _release_server(self, server_id, request_id=None):
        pass


class Worker(AgentLoopWorker):
    def __init__(self, model, calls):
        rollout = {
            "name": "vllm",
            "prompt_length": 1024,
            "response_length": 1024,
            "full_determinism": False,
            "multi_turn": {
                "max_user_turns": None,
                "max_assistant_turns": 4,
                "max_parallel_calls": 2,
                "max_tool_response_length": 256,
                "tool_response_truncate_side": "middle",
                "format": "hermes",
            },
        }
        self.config = OmegaConf.create({"data": {}, "actor_rollout_ref": {"rollout": rollout}})
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.llm_client = Client(self.config, self.tokenizer, calls)
        self.processor, self.hf_model_type, self.dataset_cls = None, "qwen2", RLHFDataset
        self.tools = list(FUNCTION_TOOL_REGISTRY.values())

    async def _agent_loop_postprocess(self, output, validate, **kwargs):
        return output.num_turns


async def sample(model, number):
    calls = [["search", "crawl" if number == 2 else "search"], ["broken"]] if number else []
    return await Worker(model, calls)._run_agent_loop(
        {},
        {"step": 5, "sample_index": number, "rollout_n": 0, "validate": False},
        agent_name="tool_agent",
        trace=False,
        session_id=1,
        raw_prompt=[{"role": "user", "content": "a secret question"}],
    )


async def main(model):
    print("TURNS", await asyncio.gather(*(sample(model, number) for number in range(SAMPLES))))


if __name__ == "__main__":
    assert ToolAgentLoop
    asyncio.run(main(sys.argv[1]))
