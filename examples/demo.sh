#!/usr/bin/env bash
# Run verl's GRPO for 4 steps with autoprof on, then show the files that autoprof wrote. See examples/verl_cpu.
set -euo pipefail
cd "$(dirname "$0")/.."

runs=${AUTOPROF_DIR:-autoprof_runs}
mkdir -p "$runs"
log=$runs/demo.log
started=$SECONDS

say() { printf '%4ds  %s\n' $((SECONDS - started)) "$*"; }

echo "== AUTOPROF=1 AUTOPROF_STEPS=2,4 python -m verl.trainer.main_ppo ... (its output: $log) =="
AUTOPROF=1 AUTOPROF_STEPS=${AUTOPROF_STEPS:-2,4} timeout --kill-after=10 600 examples/verl_cpu/run_grpo.sh "$@" \
  >"$log" 2>&1 &
run=$!
trap 'kill "$run" 2>/dev/null || true' INT TERM

# Texts to wait for in the log, in this order, with the line to print. Imports in many processes take most of the time.
marks=(
  "TaskRunner|the trainer process is up"
  "WorkerDict|the actor's process is up"
  "vLLMHttpServer|the vLLM server is up"
  "EngineCore|vLLM's engine is up"
  "AgentLoopWorker|the agent loop is up"
  "step:1 - |step 1 is done"
  "step:2 - |step 2 is done (captured)"
  "step:3 - |step 3 is done"
  "step:4 - |step 4 is done (captured)"
)
say "starting"
next=0
while kill -0 "$run" 2>/dev/null; do
  while [[ $next -lt ${#marks[@]} ]] && grep -q -- "${marks[next]%%|*}" "$log" 2>/dev/null; do
    say "${marks[next]#*|}"
    next=$((next + 1))
  done
  sleep 1
done
if ! wait "$run"; then
  tail -n 40 "$log"
  say "the run failed; its output is in $log"
  exit 1
fi
say "the run is done"

latest=$(cd "$runs/latest" && pwd -P)
echo
echo "== $runs/$(basename "$latest") =="
(cd "$latest" && find . -mindepth 1 | sort | sed -e 's|^\./||' -e 's|[^/]*/|    |g')
echo
echo "== autoprof ls latest =="
.venv/bin/autoprof ls latest --dir "$runs"
first=$(basename "$(find "$latest" -maxdepth 1 -name 'global_step_*' | sort | head -n 1)")
step=$((10#${first#global_step_}))
echo
echo "== autoprof merge latest --step $step =="
.venv/bin/autoprof merge latest --step "$step" --dir "$runs"
echo
echo "== autoprof report latest =="
.venv/bin/autoprof report latest --dir "$runs"
echo
echo "Open the report in any browser. To see the step's trace, run autoprof open latest --dir $runs, or open the merged"
echo "file, or one of the single traces, on https://ui.perfetto.dev."
