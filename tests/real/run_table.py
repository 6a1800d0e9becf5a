"""The real runs of verl, each made once in a test run, and the modules of tests that read what each leaves.

A run takes one to two minutes of a machine with two cores, nearly all of it imports in a dozen processes: a check
that needs other steps or settings asks one of these runs for them, by a further step and a window of its own.
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
# Validation and a checkpoint, so that a step has all that a step may hold.
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
# PPO with a critic and a reference on two workers, which see two mini-batches a step, and have an engine each.
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
    """A run of verl.

    Attributes:
        what: What is particular about it.
        serves: The modules of tests that read what it leaves.
        overrides: Of verl's configuration; `{folder}` is the run's, `{before}` that of the run that it goes on from.
        settings: Variables of its environment, likewise.
        asks: What others ask of it while it goes on.
        packages: Folders of packages in front of the environment's.
        script: Of examples/verl_cpu.
        files: What lies in its folder before, by path.
        before: The run that it goes on from.
        thorough: Whether it is made with --thorough only.
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
        what="The V1 trainer, verl's default, with autoprof: four steps, of which two are captured.",
        serves=("test_verl", "test_verl_report", "test_verl_timeline", "test_verl_against_trl"),
        overrides=WHOLE,
        settings=ON,
    ),
    "v1_off": Planned(
        what="The V1 trainer without autoprof's variable, for as many steps as the faulty run.",
        serves=("test_verl", "test_verl_matrix", "test_verl_stacks", "test_verl_deaths", "test_faults"),
        overrides=(*WHOLE, "trainer.total_training_steps=6"),
    ),
    "faulty": Planned(
        what="""Six steps, all captured. In four something goes wrong, each time something else; in the third and the
        fourth, the one with a checkpoint, FSDP2 moves parameters in nearly every stage, for shapes and stacks that
        somebody asks for.""",
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
        what="""The V1 trainer with autoprof, of which somebody asks twice where its processes stand, the second time
        for functions in C.""",
        serves=("test_verl_stacks",),
        overrides=(*WHOLE, "trainer.total_training_steps=14"),
        settings={"AUTOPROF": "1", "AUTOPROF_STEPS": ""},
        asks=[Ask("--json --wait 100", after=1, command="stacks"), Ask("--native --wait 0", after=1, command="stacks")],
        thorough=True,
    ),
    "critic": Planned(
        what="""PPO with a critic and a reference, under FSDP1, two workers, each with an engine, and other settings:
        one step, some roles, fewer passes of the engine, a command at the end.

        While it starts, somebody asks for steps 3 to 6 as well, each with settings of its own; when a step is through,
        somebody asks for two more, and waits for the traces.""",
        serves=("test_verl", "test_verl_table", "test_verl_trigger"),
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
        what="""The same with V1's trainer and FSDP2, two answers to each prompt, a capture for whole steps: of 2 and 3
        together, and of 5 with other settings.""",
        serves=("test_verl_table", "test_verl_timeline"),
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
    ),
    "planted": Planned(
        what="""Two trainer workers, two engines, samples that call a tool: seven of 24 steps are slow, each for its
        own cause (planted.py).

        One of them is captured, on both ranks: a rank that is late inside a stage is waited for inside of it. A replica
        and a rank that are slower than their like, and a step that is much slower than the others, open windows, the
        last for the ranks that were the slowest.""",
        serves=("test_verl_report", "test_verl_when"),
        overrides=(
            *TWO_DEVICES,
            *("trainer.total_training_steps=24", "trainer.total_epochs=2", "data.max_response_length=64"),
            *("actor_rollout_ref.model.external_lib=planted", "actor_rollout_ref.actor.policy_loss.loss_mode=planted"),
            f"reward.custom_reward_function.path='{SCRIPTS}/planted_reward.py'",
            # Both answers to a prompt, and different ones.
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
            factor = 8
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
        what="SFT in two ranks of torchrun's, the second captured; it leaves a checkpoint.",
        overrides=(_KEEPS, "trainer.total_training_steps=3"),
        settings={"AUTOPROF": "1", "AUTOPROF_STEPS": "2", "AUTOPROF_RANKS": "1", "RANKS": "2"},
        **_SFT,
    ),
    "sft_resumed": Planned(
        what="The run before, gone on with.",
        overrides=(
            "trainer.default_local_dir={before}/checkpoints",
            "trainer.resume_mode=auto",
            "trainer.total_training_steps=5",
        ),
        settings={"AUTOPROF": "1", "AUTOPROF_STEPS": "+2", "AUTOPROF_WHEN": "resume:1", "RANKS": "2"},
        before="sft",
        **_SFT,
    ),
    # From here on with --thorough only.
    "sft_ray": Planned(
        what="SFT in a worker of Ray's.",
        settings={"AUTOPROF": "1", "AUTOPROF_STEPS": "+2", "TRAINER": "sft_trainer_ray", "RAY_ADDRESS": "local"},
        thorough=True,
        **_SFT,
    ),
    "legacy": Planned(
        what="The legacy trainer with autoprof. Its releases are run by `make test-releases`, too.",
        serves=("test_verl",),
        overrides=("trainer.use_v1=False", *WHOLE),
        settings=ON,
        thorough=True,
    ),
    "legacy_off": Planned(
        what="The legacy trainer with AUTOPROF=0.",
        serves=("test_verl",),
        overrides=("trainer.use_v1=False", *WHOLE),
        settings=ON | {"AUTOPROF": "0"},
        thorough=True,
    ),
    "verls_own": Planned(
        what="verl's own profiler in step 2, autoprof in steps 2 and 3. In V1 autoprof records the engine first.",
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
        what="V1 with answers that outlast a step, on the trainer's own devices.",
        serves=("test_verl_async",),
        settings=ON | {"TRAINER": "colocate_async"},
        thorough=True,
    ),
    "separate_async": Planned(
        what="V1 with two updates a step, and an engine with devices of its own, the second replica.",
        serves=("test_verl_async",),
        settings=ALL_PASSES | {"TRAINER": "separate_async"},
        files={"autoprof.toml": '[role.rollout]\nranks = "1"\n'},
        thorough=True,
    ),
    "fully_async": Planned(
        what="Trainer and rollouter as actors, two updates a step, and an engine with devices of its own.",
        serves=("test_verl_async",),
        settings=ALL_PASSES | {"TRAINER": "fully_async"},
        thorough=True,
    ),
    "sft_off": Planned(
        what="The run `sft` without autoprof.",
        overrides=(_KEEPS, "trainer.total_training_steps=3"),
        settings={"RANKS": "2"},
        thorough=True,
        **_SFT,
    ),
}
