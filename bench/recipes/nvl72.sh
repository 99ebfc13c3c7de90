#!/usr/bin/env bash
# Acceptance test of an NVL72 rack: 18 machines with 4 GPUs, over NVSHMEM. Not run on a rack yet.
#
#   bench/recipes/nvl72.sh                         # once: srun starts the ranks
#   HEAD=node1 bench/recipes/nvl72.sh torchrun     # on each of the 18 machines; HEAD is one of them
#
# The load is that of large models: 288 experts of 37.75 MB, 2 slots. 600 GB/s and 1.2 times the bound
# are examples: derive the limits from a rack that you trust, with a margin.
set -euo pipefail

export NVSHMEM_SYMMETRIC_SIZE=${NVSHMEM_SYMMETRIC_SIZE:-2G}  # holds weights and slots

launcher=(srun --nodes 18 --ntasks-per-node 4 --gpus-per-node 4 --kill-on-bad-exit=1 python)
if [[ ${1:-srun} == torchrun ]]; then
  launcher=(torchrun --nnodes 18 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint "$HEAD:29500")
fi

exec "${launcher[@]}" -m ultraep_comm.bench accept --engine cuda --fabric nvshmem \
  --experts 288 --slots 2 --imbalance 2 -b 36M --sms 32 -n 100 \
  --min-bandwidth 600 --max-over-bound 1.2 --link-gbps 710 --json accept.json
