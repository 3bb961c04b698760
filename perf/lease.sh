#!/usr/bin/env bash
# What a GPU that is lent for a quarter of an hour is asked first, in three calls.
#
#   perf/lease.sh pack [3.12]     here: all that such a machine lacks, for that Python, into .gpu/, which git ignores
#   perf/lease.sh engine          there, 240 s: checkpoints; steps of the engine; `pytest -m cuda`
#   perf/lease.sh code            there, 290 s: the code trace, three policies, two turns; ours with other steps
#   perf/lease.sh conversation    there, 200 s: conversations at 256 rows, ours and first come first served
#
# There means: in the root of a checkout with .gpu carried along, on a machine with torch (2.11 or later), triton,
# transformers, aiohttp and grpcio, and neither network nor Triton server. Results go to $OUT. A part that fails or
# takes too long costs its own result only. Rehearsal: SHAPE=tiny DEVICE=cpu TRACES=… WINDOW=2 (perf/README.md).
# Of 900 s these limits, which unpacking and checkpoints count in, take 730. 110 are allowed for one start ("a minute or
# more", not measured) and transfers. Calls must follow at once: an idle machine goes back after 30 s.
set -uo pipefail
cd "$(dirname "$0")/.."
shape=${SHAPE:-8b} device=${DEVICE:-cuda} traces=${TRACES:-.gpu/traces} window=${WINDOW:-12}
out=${OUT:-.gpu/out} work=${WORK:-/dev/shm/tidegate-lease}

pack() {
  python=${1:-3.12} folder=.gpu
  local home=${TIDEGATE_HOME:-.tidegate} wheel=triton-0.7.0
  local wheels=$(mktemp -d) platforms
  mkdir -p $folder/traces $wheels/py
  # Of the stubs for six Pythons one is needed; the backends are laid out again.
  [ -e $folder/triton-$python.tar.xz ] || { tar -C "$(readlink -f "$home/$wheel/..")" --exclude='backends-*' --exclude='*.lock' \
    $(cd "$home/$wheel/pytriton/tritonserver/python_backend_stubs" && printf -- '--exclude=python_backend_stubs/%s ' [0-9]* \
      | sed "s/--exclude=python_backend_stubs\/${python/./\\.} //") \
    -c $wheel | xz -9 -T0 >$wheels/triton && mv $wheels/triton $folder/triton-$python.tar.xz || return 1; }
  platforms=$(printf -- '--platform %s_x86_64 ' manylinux1 manylinux2010 manylinux2014 manylinux_2_{12,17,24,26,27,28,31,34,35})
  # tritonclient without its numpy and grpcio, which are there. No FlashInfer: to compile its kernels takes minutes.
  .venv/bin/python -m pip download --quiet --dest $wheels --only-binary=:all: --no-deps -c constraints.txt \
    --python-version "$python" --implementation cp --abi "cp${python/./}" --abi abi3 --abi none $platforms \
    msgspec pydantic pydantic-core pydantic-settings python-dotenv annotated-types typing-inspection typing-extensions \
    prometheus-client rich pygments markdown-it-py mdurl tritonclient ml-dtypes python-rapidjson protobuf grpcio-health-checking \
    h2 imagesize llguidance click cel-expr-python \
    pytest pluggy iniconfig pytest-timeout pytest-asyncio pytest-xdist execnet hypothesis sortedcontainers attrs
  for wheel in $wheels/*.whl; do python3 -m zipfile -e $wheel $wheels/py || return 1; done
  find $wheels/py -name '*.so' -exec strip --strip-unneeded {} +
  tar -C $wheels -c py | xz -9 -T0 >$folder/packages-$python.tar.xz && rm -r $wheels
  cp "${TRACES_FROM:-../shared/traces}"/azure-llm-2023-{code,conversation}.csv $folder/traces/
  { git ls-files -z && find $folder/*"-$python.tar.xz" $folder/traces -type f -print0; } | xargs -0 cat | wc -c |
    awk '{printf "%.1f MiB travel with the checkout; 64 may\n", $1 / 2 ^ 20}'
}

unpack() {
  local python=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  tar -C "$work" -xJf ".gpu/packages-$python.tar.xz" || { echo "perf/lease.sh pack $python first"; exit 1; }
  tar -C "$work/home" -xJf ".gpu/triton-$python.tar.xz" || exit 1
  python3 -c "from pathlib import Path; from pool.engines.triton_wheel import lay_out; lay_out(Path('$work/home'))" || exit 1
  touch "$work/unpacked"
}

# Random weights, written once; models with other mean lengths of answers are links to them.
checkpoints() {
  rm -rf "$work/$shape" "$work/$shape"-*
  python3 -c "
import os, shutil
from pathlib import Path
from perf.engine.checkpoints import SHAPES, make_checkpoint, set_ends
shape, written = SHAPES['$shape'], Path('$work/$shape/model')
make_checkpoint(written, shape, seed=0)
for answers in 28, 211:
    path = Path(f'$work/$shape-{answers}')
    shutil.copytree(written, path, copy_function=os.link)
    set_ends(path, shape, answers, seed=0)"
}

prepare() {
  mkdir -p "$out" "$work/home"
  export TIDEGATE_HOME=$work/home PYTHONUNBUFFERED=1 PYTHONPATH=$work/py:client:$PWD${PYTHONPATH:+:$PYTHONPATH}
  [ -e "$work/unpacked" ] || part unpack 20 perf/lease.sh unpack
  [ -e "$work/$shape-211" ] || part checkpoints 45 perf/lease.sh checkpoints
}

# part NAME SECONDS COMMAND…: runs it, notes what came of it, and continues
part() {
  local name=$1 seconds=$2 began=$SECONDS
  shift 2
  timeout -k 5 $((seconds - 5)) "$@" >"$out/$name.log" 2>&1
  echo "$name: exit status $? after $((SECONDS - began)) of $seconds s" | tee -a "$out/parts.txt"
  tail -n 25 "$out/$name.log"
}

# goodput NAME SECONDS ANSWERS TRACE OPTIONS…
goodput() {
  local name=$1 seconds=$2 model=$work/$shape-$3 trace=azure-llm-2023-$4.csv
  shift 4
  part "$name" "$seconds" python3 -m perf.goodput --model "$model" --device "$device" --trace "$traces/$trace" \
    --arrivals trace --loads 2 --seconds "$window" --json "$out/$name.json" --allow-dirty "$@"
}

engine() {
  local steps=(python3 -m perf.engine.gpu --device "$device" --shape "$shape" --scratch "$work/$shape" --only steps --allow-dirty)
  part steps 60 "${steps[@]}" --profile "$out/profile.txt" --json "$out/steps.json"
  part cuda 40 python3 -m pytest -q -W ignore -p no:cacheprovider -n 0 -m cuda tests/worker/runner
  part attention 15 python3 -m pytest -q -W ignore -p no:cacheprovider -n 0 tests/worker/attention/test_triton.py -k fixed_tensors
}

code() {
  goodput code 200 28 code --turns "${TURNS:-2}" --policies ours no-prediction fifo-hang-up
  # Another number than the one that was chosen at load.
  local chosen=$(grep -m 1 -o '[0-9]* tokens a step' "$out/code.json" | cut -d ' ' -f 1)
  TIDEGATE_WORKER__MAX_STEP_TOKENS=${TOKENS:-$((chosen == 1024 ? 2048 : 1024))} \
    goodput code-tokens 90 28 code --turns 1 --policies ours
}

conversation() {
  TIDEGATE_WORKER__MAX_RUNNING=256 goodput conversation "${LEFT:-200}" 211 conversation --turns 1 --policies ours fifo-hang-up
}

case ${1:-} in
  pack) pack "${2:-}" ;;
  unpack | checkpoints) "$1" ;;
  engine | code | conversation)
    prepare && "$1"
    # Few files come back from such a machine.
    cd "$out" && tar -czf "$1.tar.gz" --exclude='*.tar.gz' . && find . -type f ! -name '*.tar.gz' -delete
    ;;
  *) sed -n '2,14s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
