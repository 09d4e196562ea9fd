#!/bin/sh
# All that needs a GPU, in under nine minutes: bench/gpu.sh [DATE]. Needs torch, transformers and peft, and no network.
# Each part has a time limit of its own, so that one that hangs cannot eat the rest. Results: bench/results/.
cd "$(dirname "$0")/.." || exit 1
date=${1:-$(date +%F)}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
device=${DEVICE:-cuda}
failed=0

part() { # seconds, part, shape
    echo "== $2 $3, at most $1 s"
    PYTHONPATH=. timeout -k 5 "$1" "$python" -m bench.gpu --part "$2" --shape "$3" --device "$device" \
        --out "bench/results/gpu-$date-$3-$2.json" || { echo "$2 $3 failed ($?)"; failed=1; }
}

for line in ${PARTS:-60:train:0.5b 90:train:1.5b 120:train:8b 60:swap:0.5b 60:swap:1.5b 110:swap:8b}; do
    part $(echo "$line" | tr : ' ')
done
exit $failed
