"""Real runs of verl, each made once in a test run; many tests read what it left."""

from __future__ import annotations

from pathlib import Path

import pytest
from npu_stand_in import RELEASES, STAND_INS
from verl_runs import VerlRun, verl_run

ON = {"AUTOPROF": "1", "AUTOPROF_STEPS": "2,4"}
ALL_PASSES = ON | {"AUTOPROF_ROLLOUT_ITERATIONS": "all"}
# Validation and a checkpoint, so that a step has all that a step may hold.
WHOLE = ["trainer.test_freq=2", "trainer.save_freq=4", "trainer.default_local_dir=checkpoints"]


# PPO with a critic and a reference on two workers, which see two mini-batches a step, and have an engine each.
TWO_WORKERS = [
    "algorithm.adv_estimator=gae",
    "trainer.n_gpus_per_node=2",
    "++ray_kwargs.ray_init.num_gpus=2",
    "ray_kwargs.ray_init.num_cpus=32",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "critic.ppo_mini_batch_size=2",
    "critic.ppo_micro_batch_size_per_gpu=1",
    "critic.forward_micro_batch_size_per_gpu=1",
]
SLOW_REWARD = Path(__file__).parent / "verl_scripts" / "slow_reward.py"
EVERYTHING = "cpu,stack,shapes,memory,module"


@pytest.fixture(scope="session")
def v1(tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """The V1 trainer, verl's default, with autoprof."""
    return verl_run(tmp_path_factory.mktemp("v1"), *WHOLE, **ON)


@pytest.fixture(scope="session")
def asked(tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """30 steps without a window; somebody asks for two of them when three are through, and waits for the traces."""
    folder = tmp_path_factory.mktemp("asked")
    asks = ["--steps 2 --wait --rollout-iterations 0:3"]
    epochs = ["trainer.total_epochs=2", "trainer.total_training_steps=30"]
    return verl_run(folder, *epochs, asks=asks, after=3, AUTOPROF="1", AUTOPROF_STEPS="")


@pytest.fixture(scope="session")
def v1_off(tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """The V1 trainer without autoprof's variable."""
    return verl_run(tmp_path_factory.mktemp("v1-off"), *WHOLE)


@pytest.fixture(scope="session")
def legacy(thorough: None, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """The legacy trainer with autoprof. Its releases are run by `make test-releases`, too."""
    return verl_run(tmp_path_factory.mktemp("legacy"), "trainer.use_v1=False", *WHOLE, **ON)


@pytest.fixture(scope="session")
def legacy_off(thorough: None, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """The legacy trainer with AUTOPROF=0."""
    folder = tmp_path_factory.mktemp("legacy-off")
    return verl_run(folder, "trainer.use_v1=False", *WHOLE, AUTOPROF="0", AUTOPROF_STEPS="2,4")


@pytest.fixture(scope="session")
def critic(tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """PPO with a critic and a reference, under FSDP1, two workers, each with an engine, and other settings: one step,
    some roles, fewer passes of the engine, a command at the end.

    While it runs, somebody asks for steps 3 to 6 as well, each with settings of its own.
    """
    folder = tmp_path_factory.mktemp("critic")
    settings = {
        "AUTOPROF": "1",
        "AUTOPROF_STEPS": "+2",
        "AUTOPROF_ROLES": "critic,ref,rollout",
        "AUTOPROF_ROLLOUT_ITERATIONS": "2:7",
        "AUTOPROF_CONTENTS": "cpu,shapes,cuda",
        "AUTOPROF_ON_FINISH": f'ls "$AUTOPROF_RUN_DIR"/global_step_000002 > {folder}/finished.txt',
    }
    overrides = [*TWO_WORKERS, "trainer.total_training_steps=6"]
    overrides += ["actor_rollout_ref.actor.strategy=fsdp", "critic.strategy=fsdp"]
    asks = [
        "--at 3 --contents cpu --rollout-iterations 0:3",
        f"--from 4 --roles * --ranks all --contents {EVERYTHING} --rollout-iterations 0:3",
        "--from 5 --roles * --ranks 1 --contents cpu --mini-batches 1:2 --rollout-iterations 0:3",
        "--at 6 --roles actor,rollout --tool npu --contents cpu,npu,shapes --rollout-iterations 0:3",
    ]
    settings |= {"AUTOPROF_TOOL": "torch", "TORCH_NPU_STAND_IN": RELEASES[-1]}
    return verl_run(folder, *overrides, asks=asks, packages=[STAND_INS], **settings)


@pytest.fixture(scope="session")
def slowed(tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """Twelve steps in two workers, of which the tenth waits for a reward; a step that is slow opens a window."""
    overrides = [
        *TWO_WORKERS,
        "algorithm.adv_estimator=grpo",
        "trainer.total_training_steps=12",
        "trainer.total_epochs=8",
    ]
    overrides += ["data.train_batch_size=8", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.top_k=-1"]
    overrides += ["actor_rollout_ref.rollout.max_num_seqs=16", f"reward.custom_reward_function.path='{SLOW_REWARD}'"]
    settings = {"AUTOPROF": "1", "AUTOPROF_STEPS": "", "AUTOPROF_WHEN": "step>3x, oom", "AUTOPROF_RANKS": "slowest"}
    settings |= {"AUTOPROF_ROLLOUT_ITERATIONS": "0:3"}
    return verl_run(tmp_path_factory.mktemp("slowed"), *overrides, **settings)


@pytest.fixture(scope="session")
def continuous(tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """The same with V1's trainer and FSDP2, two answers to each prompt, a capture for whole steps: of 2, of 4 and 5
    together, and of 7 with other settings."""
    settings = {
        "AUTOPROF": "1",
        "AUTOPROF_MODE": "continuous",
        "AUTOPROF_CONSECUTIVE": "together",
        "AUTOPROF_STEPS": "2,4:6",
        "AUTOPROF_RANKS": "all",
        "AUTOPROF_CONTENTS": EVERYTHING,
        "AUTOPROF_ROLLOUT_ITERATIONS": "0:3",
    }
    asks = ["--from 7 --ranks 1 --contents cpu"]
    folder = tmp_path_factory.mktemp("continuous")
    two_answers = ["actor_rollout_ref.rollout.n=2", "data.train_batch_size=2"]
    two_answers += [f"{role}.ppo_mini_batch_size=1" for role in ("actor_rollout_ref.actor", "critic")]
    overrides = [*TWO_WORKERS, *two_answers, "trainer.total_training_steps=7"]
    return verl_run(folder, *overrides, asks=asks, **settings)


@pytest.fixture(scope="session")
def verls_own(thorough: None, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """verl's own profiler in step 2, autoprof in steps 2 and 3. In V1 autoprof's engine recording starts first."""
    folder = tmp_path_factory.mktemp("verls-own")
    profiler = "profiler.tool_config.torch"
    overrides = ["global_profiler.tool=torch", "global_profiler.steps=[2]", f"global_profiler.save_path={folder}/own"]
    for role in ("actor", "rollout"):
        overrides += [f"actor_rollout_ref.{role}.profiler.{name}=True" for name in ("enable", "all_ranks")]
        overrides += [f"actor_rollout_ref.{role}.{profiler}.discrete=True"]
        overrides += [f"actor_rollout_ref.{role}.{profiler}.contents=[cpu]"]
    return verl_run(folder, *overrides, "trainer.total_training_steps=3", AUTOPROF="1", AUTOPROF_STEPS="2:4")


@pytest.fixture(scope="session")
def colocate_async(thorough: None, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """V1 with answers that outlast a step, on the trainer's own devices."""
    return verl_run(tmp_path_factory.mktemp("colocate-async"), TRAINER="colocate_async", **ON)


@pytest.fixture(scope="session")
def separate_async(thorough: None, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """V1 with two updates a step, and an engine with devices of its own, the second replica."""
    folder = tmp_path_factory.mktemp("separate-async")
    (folder / "autoprof.toml").write_text('[role.rollout]\nranks = "1"\n')
    return verl_run(folder, TRAINER="separate_async", **ALL_PASSES)


@pytest.fixture(scope="session")
def fully_async(thorough: None, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """Trainer and rollouter as actors, two updates a step, and an engine with devices of its own."""
    return verl_run(tmp_path_factory.mktemp("fully-async"), TRAINER="fully_async", **ALL_PASSES)


@pytest.fixture(scope="session")
def sft(tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """SFT in two ranks of torchrun's, the second captured; it leaves a checkpoint."""
    folder = tmp_path_factory.mktemp("sft")
    settings = {"AUTOPROF": "1", "AUTOPROF_STEPS": "2", "AUTOPROF_RANKS": "1"}
    checkpoints = f"trainer.default_local_dir={folder}/checkpoints"
    return verl_run(folder, checkpoints, "trainer.total_training_steps=3", script="run_sft.sh", RANKS="2", **settings)


@pytest.fixture(scope="session")
def sft_off(thorough: None, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """The same run without autoprof."""
    folder = tmp_path_factory.mktemp("sft-off")
    checkpoints = f"trainer.default_local_dir={folder}/checkpoints"
    return verl_run(folder, checkpoints, "trainer.total_training_steps=3", script="run_sft.sh", RANKS="2")


@pytest.fixture(scope="session")
def sft_resumed(sft: VerlRun, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """The run before, gone on with."""
    resume = [f"trainer.default_local_dir={sft.folder}/checkpoints", "trainer.resume_mode=auto"]
    folder = tmp_path_factory.mktemp("sft-resumed")
    steps = "trainer.total_training_steps=5"
    settings = {"AUTOPROF": "1", "AUTOPROF_STEPS": "+2", "AUTOPROF_WHEN": "resume:1"}
    return verl_run(folder, *resume, steps, script="run_sft.sh", RANKS="2", **settings)


@pytest.fixture(scope="session")
def sft_ray(tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """SFT in a worker of Ray's."""
    folder = tmp_path_factory.mktemp("sft-ray")
    return verl_run(folder, script="run_sft.sh", TRAINER="sft_trainer_ray", AUTOPROF="1", AUTOPROF_STEPS="+2")


@pytest.fixture(scope="session", params=["v1", "legacy"])
def profiled(request: pytest.FixtureRequest) -> VerlRun:
    """A run with autoprof, of either trainer."""
    run: VerlRun = request.getfixturevalue(request.param)
    return run


@pytest.fixture(scope="session", params=["v1_off", "legacy_off"])
def unprofiled(request: pytest.FixtureRequest) -> VerlRun:
    """A run without autoprof, of either trainer."""
    run: VerlRun = request.getfixturevalue(request.param)
    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("real")
