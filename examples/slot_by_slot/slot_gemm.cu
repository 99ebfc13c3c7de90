// A grouped GEMM that begins with the slots that are there: each block waits for its own slot
// alone, while replicate_experts() still fills others.
//
// Build: nvcc -arch=sm_90 -std=c++20 -cubin -I$(python -c "import ultraep_comm as uec;
// print(uec.get_include())") slot_gemm.cu
#include "cuda/device/ready.cuh"
#include "slot_gemm.h"

// out[slot][token][n] = sum over k of tokens[token][k] * slots[slot][n][k], for the slots listed.
// Blocks: num_slots * blocks_per_slot. A slot that is not there in time leaves its output alone.
extern "C" __global__ void slot_gemm(const __grid_constant__ SlotGemm args) {
  const int slot = args.slots_used[blockIdx.x / args.blocks_per_slot];
  __shared__ bool is_there;
  if (threadIdx.x == 0)
    is_there = uec::cuda::wait_slot(args.ready, slot, args.number, args.timeout_ns);
  __syncthreads();
  if (!is_there) return;
  // Four bytes to a word. Not __restrict__, nor __ldg(): both allow loads ahead of the wait, or
  // from stale caches.
  const int words = args.k / 4;
  const auto* const weights =
      reinterpret_cast<const int32_t*>(args.slots) + static_cast<int64_t>(slot) * args.n * words;
  const auto* const tokens = reinterpret_cast<const int32_t*>(args.tokens);
  int32_t* const out = args.out + static_cast<int64_t>(slot) * args.num_tokens * args.n;
  const int first = (blockIdx.x % args.blocks_per_slot) * blockDim.x + threadIdx.x;
  for (int i = first; i < args.num_tokens * args.n; i += args.blocks_per_slot * blockDim.x) {
    const int32_t* const row = weights + static_cast<int64_t>(i % args.n) * words;
    const int32_t* const token = tokens + static_cast<int64_t>(i / args.n) * words;
    int32_t sum = 0;
    for (int k = 0; k < words; ++k) sum = __dp4a(row[k], token[k], sum);
    out[i] = sum;
  }
}
