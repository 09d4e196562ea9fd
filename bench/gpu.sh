#!/bin/sh
# All that needs GPUs: bench/gpu.sh [DATE]. Needs the extra "train" and vLLM, TRL for its part, and no network. Parts that
# need more GPUs than there are have no figures. Each part has a time limit of its own, so that one that hangs cannot eat
# the rest. The first six take under nine minutes in all. Results: bench/results/.
cd "$(dirname "$0")/.." || exit 1
date=${1:-$(date +%F)}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
device=${DEVICE:-cuda}
failed=0

part() { # seconds, part, shape, GPUs
    echo "== $2 $3 on ${4:-1} GPUs, at most $1 s"
    PYTHONPATH=. timeout -k 5 "$1" "$python" -m bench.gpu --part "$2" --shape "$3" --gpus "${4:-1}" --device "$device" \
        --out "bench/results/gpu-$date-$3-$2-${4:-1}.json" || { echo "$2 $3 on ${4:-1} GPUs failed ($?)"; failed=1; }
}

for line in ${PARTS:-60:train:0.5b 90:train:1.5b 120:train:8b 60:swap:0.5b 60:swap:1.5b 110:swap:8b \
    400:colocated:8b 400:sleep:8b 900:long:8b 400:trl:8b \
    400:colocated:8b:all 400:split:8b:all 400:ahead:8b:all 600:full:1.5b 600:full:8b:all 400:parallel:8b:all 400:fleet:8b:all 900:long:8b:all}; do
    part $(echo "$line" | tr : ' ')
done
exit $failed
