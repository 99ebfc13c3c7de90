#!/usr/bin/env bash
# Acceptance test of an NVL72 rack: 18 machines with 4 GPUs, over NVSHMEM. Not run on a rack yet.
#
#   bench/recipes/nvl72.sh                         # once: srun starts the ranks
#   HEAD=node1 bench/recipes/nvl72.sh torchrun     # on each of the 18 machines; HEAD is one of them
#
# The load is that of large models: 288 experts of 37.75 MB, 2 slots. 600 GB/s and 1.2 times the bound
# are examples: derive the limits from a rack that you trust, with a margin. A command that fails does
# not keep the others from running: they are listed at the end, and the exit status is 1.
set -euo pipefail

export NVSHMEM_SYMMETRIC_SIZE=${NVSHMEM_SYMMETRIC_SIZE:-2G}  # holds weights and slots
model=(--engine cuda --fabric nvshmem --experts 288 --slots 2 --imbalance 2)

launcher=(srun --nodes 18 --ntasks-per-node 4 --gpus-per-node 4 --kill-on-bad-exit=1 python)
if [[ ${1:-srun} == torchrun ]]; then
  launcher=(torchrun --nnodes 18 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint "$HEAD:29500")
fi
failed=()

bench() {
  "${launcher[@]}" -m ultraep_comm.bench "$@" || failed+=("status $?: $*")
}

# All 5112 links, 36 at a time; in colour on a terminal. Takes minutes.
bench links --engine cuda --fabric nvshmem -b 64M -n 20 -c 1 --min-bandwidth 600 \
  --json links.json --csv links.csv

# The transfer itself, at the size of large models.
bench replicate "${model[@]}" -b 36M --mode auto --sms 32 -n 100 -c 1 \
  --min-bandwidth 600 --max-over-bound 1.2 --link-gbps 710 --json rack.json

# For reference: from latency to bandwidth, by number of blocks, and the reduction.
bench replicate "${model[@]}" -b 64K -e 64M -f 2 --times p50,p99,max --json sweep.json --csv sweep.csv
bench replicate "${model[@]}" -b 36M --sms 8,16,24,32,48 -c 1 --json sms.json
bench replicate --op reduce "${model[@]}" -b 72M --mode auto -c 1 --json reduce.json

if ((${#failed[@]})); then
  printf 'FAILED, %s\n' "${failed[@]}" >&2
  exit 1
fi
