#!/usr/bin/env bash
# Every figure of docs/performance-log.md and of the README's tables, measured anew on this GPU; rows in $OUT.
#   make bench-h200 MODEL=folder [VLLM=python of its environment] [SGLANG=the same] [OUT=folder]
#   make bench-h200 TOKENIZER=folder ...     makes a random checkpoint of Llama-3.1-8B's shapes, with that tokenizer
#   make bench-h200 TEXT_MODEL=folder ...    quality, too: a small model with real weights, such as SmolLM2-135M-Instruct
#   make bench-h200 FP8_MODEL=folder ...     the hosts with FP8 weights, too (made with the random checkpoint)
# The tables of README.md and docs/ made of these rows go to $OUT/tables.md; TABLES=1 puts rows and tables in their places.
# RUN=echo says what would run. A part that fails is said, and the rest runs.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} OUT=${OUT:-fk-bench-runs/h200-$(date -u +%Y%m%d-%H%M%S)} RUN=${RUN:-}
FK="$PYTHON -m fk_bench.cli"
failed=()
part() {
    local name=$1
    shift
    echo "== $name: $*"
    $RUN "$@" || failed+=("$name")
}

mkdir -p "$OUT"
export PYTHONPATH="$PWD:$PWD/bench:$PWD/integrations${PYTHONPATH:+:$PYTHONPATH}"
part linear $PYTHON bench/scenarios/skinny_linear.py --out "$OUT/skinny-linear.jsonl" --model llama-8b --tokens 1,8,16,32,64
part fp8 $PYTHON bench/scenarios/linear_fp8.py --out "$OUT/linear-fp8.jsonl"
part experts $PYTHON bench/scenarios/moe_tiles.py --out "$OUT/moe-tiles.jsonl" --table "$OUT/moe-tiles-table.json"
part attention $PYTHON bench/scenarios/decode_attention.py --out "$OUT/decode-attention.jsonl"
part step $PYTHON bench/scenarios/decode_step.py --rows "$OUT/skinny-linear.jsonl" --out "$OUT/decode-step.jsonl"
part capacity $PYTHON bench/scenarios/decode_attention.py --out "$OUT/decode-attention-capacity.jsonl" --capacity 131072 \
    --batch 1,8,32 --context 512,2048,8192 --seconds 200
part engine $PYTHON bench/scenarios/engine_step.py --out "$OUT/engine-step.jsonl" --batch 1,8,32 --model-len 2048
part kernels $FK kernels all --cases captured,random --rounds 8 --out "$OUT/kernels"
part again $FK kernels all --cases random --rounds 8 --starts 2 --out "$OUT/again-1"
part again $FK kernels all --cases random --rounds 8 --starts 2 --out "$OUT/again-2"
part agreement $FK diff "$OUT/again-1" "$OUT/again-2"
for name in llama-3.1-8b qwen3-8b mixtral-8x7b; do  # 576: what a sequence of the servers below has on average
    part explain $FK explain $name --batch 1,8,32,256 --context 576 --compilers --out "$OUT/explain"
done
part start $FK e2e llama-3.1-8b --startup --load-format dummy --dtype bfloat16 --rounds 2 --out "$OUT/startup"

called=()
if [ -z "${MODEL:-}" ]; then
    MODEL=$OUT/model called=(--model-name "Llama-3.1-8B shapes, random weights")
    part model $PYTHON bench/scenarios/make_checkpoint.py "$MODEL" ${TOKENIZER:+--tokenizer "$TOKENIZER"}
    if [ -z "${FP8_MODEL:-}" ] && [ -n "${VLLM:-}${SGLANG:-}" ]; then
        FP8_MODEL=$OUT/model-fp8
        part model-fp8 $PYTHON bench/scenarios/make_checkpoint.py "$FP8_MODEL" ${TOKENIZER:+--tokenizer "$TOKENIZER"} \
            --quantize fp8
    fi
fi
lanes="" pythons=()  # the first lane is what the others are compared with
for host in VLLM SGLANG; do
    name=${host,,} path=${!host:-}
    [ -n "$path" ] && [ -n "${TEXT_MODEL:-}" ] && part "quality-$name" "$path" bench/scenarios/quality.py --host $name \
        --model "$TEXT_MODEL" --every-kernel --out "$OUT/quality.jsonl"
    for patched in 0 1; do
        [ -n "$path" ] && part "step-$name" env FASTKERNELS=$patched "$path" bench/scenarios/host_step.py $name "$MODEL" \
            --out "$OUT/host-step.jsonl"
    done
    [ -n "$path" ] && lanes+="$name,$name+fk," && pythons+=(--python "$name=$path")
done
part servers $FK serve-compare --model "$MODEL" --lanes "${lanes}fastkernels" "${pythons[@]}" --concurrency 1,8,32,128 \
    --num-prompts 3,16,64,256 --load c=1,in=1920,out=8,prompts=30 --load c=8,in=1920,out=8,prompts=48 \
    --rounds 5 --input-len 512 --output-len 128 --agreement-prompts 2 --min-agreement 0 --out "$OUT/servers"
[ -z "${FP8_MODEL:-}" ] || [ -z "$lanes" ] || part servers-fp8 $FK serve-compare --model "$FP8_MODEL" --lanes "${lanes%,}" \
    "${pythons[@]}" --concurrency 1,8,32,128 --num-prompts 3,16,64,256 --rounds 5 --input-len 512 --output-len 128 \
    --agreement-prompts 2 --min-agreement 0 --out "$OUT/servers-fp8"  # our engine loads no FP8 weights
part tables $FK tables --results "$OUT" "${called[@]}" --out "$OUT/tables.md"
[ -z "${TABLES:-}" ] || part documents $FK tables --take "$OUT" "${called[@]}"

[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}; all else is in $OUT"; exit 1; }
echo "all in $OUT"
