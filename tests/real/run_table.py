"""Table of the real runs of verl, and of the test modules that read the files of each run.

Each run is made once per test session. It takes one to two minutes on two cores, nearly all for imports in a dozen
processes. A test that needs other steps or settings therefore adds a step with its own window to one of these runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.npu_stand_in import RELEASES, STAND_INS
from tests.support.verl_runs import Ask

HERE = Path(__file__).parent
FAULTS = HERE / "faults"
SCRIPTS = HERE / "verl_scripts"
ON = {"AUTOPROF": "1", "AUTOPROF_STEPS": "2,4"}
ALL_PASSES = ON | {"AUTOPROF_ROLLOUT_ITERATIONS": "all"}
EVERYTHING = "cpu,stack,shapes,memory,module"
# Add validation and a checkpoint, so that some steps have every possible stage.
WHOLE = ("trainer.test_freq=2", "trainer.save_freq=4", "trainer.default_local_dir=checkpoints")
OFFLOAD = tuple(
    f"{config}=True"
    for config in (
        "actor_rollout_ref.actor.fsdp_config.param_offload",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
        "actor_rollout_ref.ref.fsdp_config.param_offload",
    )
)
TWO_DEVICES = ("trainer.n_gpus_per_node=2", "++ray_kwargs.ray_init.num_gpus=2", "ray_kwargs.ray_init.num_cpus=32")
# PPO with a critic and a reference on two workers. Each has an engine, and a step has two mini-batches.
TWO_WORKERS = (
    *TWO_DEVICES,
    "algorithm.adv_estimator=gae",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "critic.ppo_mini_batch_size=2",
    "critic.ppo_micro_batch_size_per_gpu=1",
    "critic.forward_micro_batch_size_per_gpu=1",
)
FAULTY_ID = "20261122-000000-000000"
_ROLLOUT = "actor_rollout_ref.rollout"
_SFT = {"script": "run_sft.sh", "serves": ("test_verl_sft",)}
_KEEPS = "trainer.default_local_dir={folder}/checkpoints"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Planned run of verl.

    Attributes:
        what: Description of the run.
        serves: Names of the test modules that read its files.
        overrides: Overrides of verl's configuration; `{folder}` is the run's folder, `{before}` the resumed run's.
        settings: Environment variables, with the same placeholders.
        asks: Commands to call during the run.
        packages: Folders of packages that precede the environment's.
        script: Name of a script in examples/verl_cpu.
        files: Contents of files to write into its folder before the run, by path.
        before: Name of the run that it resumes.
        thorough: True if it is made only with --thorough.
    """

    what: str
    serves: tuple[str, ...]
    overrides: Sequence[str] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    asks: Sequence[Ask] = ()
    packages: Sequence[Path] = ()
    script: str = "run_grpo.sh"
    files: Mapping[str, str] = field(default_factory=dict)
    before: str = ""
    thorough: bool = False


RUNS = {
    "v1": Planned(
        what="V1 trainer, verl's default, with autoprof: four steps, two of them captured.",
        serves=("test_verl", "test_verl_timeline", "test_verl_against_trl"),
        overrides=WHOLE,
        settings=ON,
    ),
    "v1_resumed": Planned(
        what="Run resumed from the checkpoint of the run `v1`, with validation and the default settings.",
        serves=("test_verl_timeline",),
        overrides=(
            *("trainer.default_local_dir={before}/checkpoints", "trainer.resume_mode=auto", "trainer.test_freq=2"),
            *("trainer.total_training_steps=7", "trainer.total_epochs=2"),
        ),
        settings={"AUTOPROF": "1"},
        before="v1",
        thorough=True,
    ),
    "v1_off": Planned(
        what="V1 trainer without autoprof's variable, with the same number of steps as the faulty run.",
        serves=("test_verl", "test_verl_matrix", "test_verl_stacks", "test_verl_deaths", "test_faults"),
        overrides=(*WHOLE, "trainer.total_training_steps=6"),
    ),
    "faulty": Planned(
        what="""Six steps, all captured. Four of them have a fault, each another one. In steps 3 and 4 triggers request
        shapes and stacks while FSDP2 moves parameters in nearly every stage; step 4 also saves a checkpoint.""",
        serves=("test_faults", "test_verl_matrix"),
        overrides=(*WHOLE, *OFFLOAD, "trainer.total_training_steps=6"),
        settings={
            "AUTOPROF": "1",
            "AUTOPROF_STEPS": "1:3,5,6",
            "AUTOPROF_RUN_ID": FAULTY_ID,
            "AUTOPROF_STOP_TIMEOUT_S": "16",
            "AUTOPROF_ROLLOUT_ITERATIONS": "all",
            "AUTOPROF_RECIPES": str(FAULTS / "verl.vanished.toml"),
            "FAULTS": "hook-raises@1,start-fails@2,stop-hangs@5",
        },
        files={f"autoprof_runs/{FAULTY_ID}/global_step_000006": "in the way"},
        asks=[Ask("--at 3,4 --contents cpu,shapes,stack --rollout-iterations 0:3")],
        packages=[FAULTS],
    ),
    "stood": Planned(
        what="""V1 trainer with autoprof and two calls of `autoprof stacks`, the second one with native frames.""",
        serves=("test_verl_stacks",),
        overrides=(*WHOLE, "trainer.total_training_steps=14"),
        settings={"AUTOPROF": "1", "AUTOPROF_STEPS": ""},
        asks=[Ask("--json --wait 100", after=1, command="stacks"), Ask("--native --wait 0", after=1, command="stacks")],
        thorough=True,
    ),
    "critic": Planned(
        what="""PPO with a critic and a reference under FSDP1, on two workers with an engine each. The settings capture
        one step, some roles and few passes of the engine, and run a command at the end.

        While the run starts, triggers request steps 3 to 6, each with its own settings. After the first step, a trigger
        requests two more steps and waits for the traces.""",
        serves=("test_verl_table",),
        overrides=(
            *TWO_WORKERS,
            "actor_rollout_ref.actor.strategy=fsdp",
            "critic.strategy=fsdp",
            "trainer.total_training_steps=9",
        ),
        settings={
            "AUTOPROF": "1",
            "AUTOPROF_STEPS": "+2",
            "AUTOPROF_ROLES": "critic,ref,rollout",
            "AUTOPROF_ROLLOUT_ITERATIONS": "2:7",
            "AUTOPROF_CONTENTS": "cpu,shapes,cuda",
            "AUTOPROF_ON_FINISH": 'ls "$AUTOPROF_RUN_DIR"/global_step_000002 > {folder}/finished.txt',
            "AUTOPROF_TOOL": "torch",
            "TORCH_NPU_STAND_IN": RELEASES[-1],
        },
        asks=[
            Ask("--at 3 --contents cpu --rollout-iterations 0:3"),
            Ask(f"--from 4 --roles * --ranks all --contents {EVERYTHING} --rollout-iterations 0:3"),
            Ask("--from 5 --roles * --ranks 1 --contents cpu --mini-batches 1:2 --rollout-iterations 0:3"),
            Ask("--at 6 --roles actor,rollout --tool npu --contents cpu,npu,shapes --rollout-iterations 0:3"),
            Ask("--from 7 --steps 2 --wait --roles * --contents cpu --rollout-iterations 0:3", after=1),
        ],
        packages=[STAND_INS],
    ),
    "continuous": Planned(
        what="""PPO with a critic and a reference under FSDP2, with two answers to each prompt. One capture covers the
        whole steps 2 and 3, another one step 5 with other settings.""",
        serves=("test_verl_table",),
        overrides=(
            *TWO_WORKERS,
            f"{_ROLLOUT}.n=2",
            "data.train_batch_size=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=1",
            "critic.ppo_mini_batch_size=1",
            "trainer.total_training_steps=6",
        ),
        settings={
            "AUTOPROF": "1",
            "AUTOPROF_MODE": "continuous",
            "AUTOPROF_CONSECUTIVE": "together",
            "AUTOPROF_STEPS": "2:4",
            "AUTOPROF_RANKS": "all",
            "AUTOPROF_CONTENTS": "cpu",
            "AUTOPROF_ROLLOUT_ITERATIONS": "0:3",
        },
        asks=[Ask(f"--from 5 --ranks 1 --contents {EVERYTHING}")],
        thorough=True,
    ),
    "planted": Planned(
        what="""Two trainer workers, two engines, and samples that call a tool. Seven of 24 steps are slow, each for
        another cause (planted.py).

        Step 7 is captured on both ranks: only a capture shows a rank that is late inside a stage, because the other
        rank waits for it there. A slow replica, a slow rank and a very slow step each open a window; the last window
        records the slowest ranks.""",
        serves=("test_verl_planted",),
        overrides=(
            *TWO_DEVICES,
            *("trainer.total_training_steps=24", "trainer.total_epochs=2", "data.max_response_length=64"),
            *("actor_rollout_ref.model.external_lib=planted", "actor_rollout_ref.actor.policy_loss.loss_mode=planted"),
            f"reward.custom_reward_function.path='{SCRIPTS}/planted_reward.py'",
            # Two different answers to each prompt.
            *(f"{_ROLLOUT}.n=2", f"{_ROLLOUT}.top_k=-1", f"{_ROLLOUT}.max_num_seqs=16"),
            *(f"{_ROLLOUT}.multi_turn.enable=True", f"{_ROLLOUT}.agent.default_agent_loop=tool_agent"),
            *(f"{_ROLLOUT}.multi_turn.format=planted", f"{_ROLLOUT}.multi_turn.max_assistant_turns=2"),
            f"{_ROLLOUT}.multi_turn.function_tool_path='{SCRIPTS}/planted_tool.py'",
        ),
        settings={
            "PLANTED": "{folder}",
            "AUTOPROF": "1",
            "AUTOPROF_STEPS": "7",
            "AUTOPROF_RANKS": "all",
            "AUTOPROF_ROLES": "actor",
            "AUTOPROF_CONTENTS": "cpu",
        },
        packages=[SCRIPTS],
        files={
            "autoprof.toml": """
            [[when]]
            what = "rank"
            factor = 8
            [[when]]
            what = "replica"
            factor = 15
            [[when]]
            what = "step"
            factor = 9
            ranks = "slowest"
            roles = "*"
            rollout-iterations = "0:3"
            [[when]]
            what = "oom"
            """
        },
    ),
    "sft": Planned(
        what="SFT in two ranks of torchrun, the second one captured; it saves a checkpoint.",
        overrides=(_KEEPS, "trainer.total_training_steps=3"),
        settings={"AUTOPROF": "1", "AUTOPROF_STEPS": "2", "AUTOPROF_RANKS": "1", "RANKS": "2"},
        **_SFT,
    ),
    "sft_resumed": Planned(
        what="SFT resumed from the checkpoint of the run `sft`.",
        overrides=(
            "trainer.default_local_dir={before}/checkpoints",
            "trainer.resume_mode=auto",
            "trainer.total_training_steps=5",
        ),
        settings={"AUTOPROF": "1", "AUTOPROF_STEPS": "+2", "AUTOPROF_WHEN": "resume:1", "RANKS": "2"},
        before="sft",
        **_SFT,
    ),
    # The following runs are made only with --thorough.
    "sft_ray": Planned(
        what="SFT in a Ray worker.",
        settings={"AUTOPROF": "1", "AUTOPROF_STEPS": "+2", "TRAINER": "sft_trainer_ray", "RAY_ADDRESS": "local"},
        thorough=True,
        **_SFT,
    ),
    "legacy": Planned(
        what="Legacy trainer with autoprof. `make test-releases` runs its releases too.",
        serves=("test_verl", "test_verl_timeline"),
        overrides=("trainer.use_v1=False", *WHOLE),
        settings=ON,
        thorough=True,
    ),
    "legacy_off": Planned(
        what="Legacy trainer with AUTOPROF=0.",
        serves=("test_verl",),
        overrides=("trainer.use_v1=False", *WHOLE),
        settings=ON | {"AUTOPROF": "0"},
        thorough=True,
    ),
    "verls_own": Planned(
        what="verl's own profiler in step 2, autoprof in steps 2 and 3. In V1, autoprof starts on the engine first.",
        serves=("test_verl",),
        overrides=(
            *("global_profiler.tool=torch", "global_profiler.steps=[2]", "global_profiler.save_path={folder}/own"),
            *(
                f"actor_rollout_ref.{role}.profiler.{name}"
                for role in ("actor", "rollout")
                for name in (
                    "enable=True",
                    "all_ranks=True",
                    "tool_config.torch.discrete=True",
                    "tool_config.torch.contents=[cpu]",
                )
            ),
            "trainer.total_training_steps=3",
        ),
        settings={"AUTOPROF": "1", "AUTOPROF_STEPS": "2:4"},
        thorough=True,
    ),
    "colocate_async": Planned(
        what="V1 with answers that take longer than a step, and an engine on the trainer's devices.",
        serves=("test_verl_async",),
        settings=ON | {"TRAINER": "colocate_async"},
        thorough=True,
    ),
    "separate_async": Planned(
        what="V1 with two updates per step; the second replica is an engine with its own devices.",
        serves=("test_verl_async",),
        settings=ALL_PASSES | {"TRAINER": "separate_async"},
        files={"autoprof.toml": '[role.rollout]\nranks = "1"\n'},
        thorough=True,
    ),
    "fully_async": Planned(
        what="Trainer and rollouter as actors, with two updates per step, and an engine with its own devices.",
        serves=("test_verl_async",),
        settings=ALL_PASSES | {"TRAINER": "fully_async"},
        thorough=True,
    ),
    "sft_off": Planned(
        what="SFT as in the run `sft`, without autoprof.",
        overrides=(_KEEPS, "trainer.total_training_steps=3"),
        settings={"RANKS": "2"},
        thorough=True,
        **_SFT,
    ),
}
