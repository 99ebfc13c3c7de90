// What a block of the load kernels keeps in shared memory, and how they are launched.
#pragma once

#include "core/transfer/call_arrays.hpp"
#include "cuda/device/block.hpp"
#include "cuda/device/load_args.hpp"
#include "cuda/device/plan_block.hpp"

namespace uec::cuda {

struct LoadShared {
  struct Team {  // a warp that exchanges rows
    Ring ring;
    Clock clock;
  };

  BlockCall block;
  Team teams[kLoadTeams];
  uint64_t digest;  // of this call and all before it
  uint64_t last_call;
  int32_t last;       // this block arrived last: it continues
  int32_t failed;     // some row was not sent, or has not come
  int32_t cancelled;  // by the host, before the call had to wait
};

// Lies behind LoadShared; a plan may overlay it once the table has been copied.
struct LoadBlock {
  int32_t* row;       // [E] counts: of this block, then of this rank. The tile that is stored
  uint64_t* bases;    // [G] copies
  uint8_t* sent;      // [G] of Gather
  uint8_t* involved;  // [G] all ranks

  // Works as CallArrays::cut(). `base` is aligned to kTileAlign bytes.
  UEC_HD static int64_t cut(std::byte* base, int32_t num_ranks, int32_t num_experts,
                            LoadBlock* block) {
    ScratchCutter cutter(base);
    block->row = cutter.take<int32_t>(num_experts);
    block->bases = cutter.take<uint64_t>(num_ranks);
    block->sent = cutter.take<uint8_t>(num_ranks);
    block->involved = cutter.take<uint8_t>(num_ranks);
    return cutter.used_bytes();
  }
};

inline constexpr int64_t kLoadHeadBytes =
    round_up(static_cast<int64_t>(sizeof(LoadShared)), kTileAlign);

UEC_HD inline int64_t load_shared_bytes(int32_t num_ranks, int32_t num_experts) {
  LoadBlock block;
  return kLoadHeadBytes + LoadBlock::cut(nullptr, num_ranks, num_experts, &block);
}
// The plan begins where LoadBlock does.
UEC_HD inline int64_t load_plan_shared_bytes(const Topology& topology, int32_t num_warps) {
  return max64(load_shared_bytes(topology.num_ranks, topology.num_experts),
               kLoadHeadBytes + plan_shared_bytes(topology, num_warps));
}

// How the load kernels are launched: a grid of num_blocks by the launch's ranks. Where shared
// memory is short, fewer warps plan in less of it; the load itself needs the same with any number.
struct LoadGrid {
  int32_t num_blocks = 0;
  int32_t num_threads = 0;
  int64_t shared_bytes = 0;

  // The last warps make the exchange ready instead, where there are enough.
  UEC_HD static int32_t num_counting(int32_t num_threads, int32_t warp_size) {
    const int32_t teams = kLoadTeams * warp_size;
    return num_threads > teams ? num_threads - teams : num_threads;
  }

  // `most_ids`: the most ids of any rank of the launch. `max_blocks`: for each rank, at least 1.
  static LoadGrid of(int32_t num_ranks, int32_t num_experts, int64_t most_ids, int32_t max_blocks,
                     int32_t num_threads = kLoadThreads, int32_t warp_size = 32) {
    return {blocks(most_ids, max_blocks, num_threads, warp_size), num_threads,
            load_shared_bytes(num_ranks, num_experts)};
  }
  static LoadGrid of_plan(const Topology& topology, int64_t most_ids, int32_t max_blocks,
                          int32_t num_warps = kMaxPlanWarps, int32_t warp_size = 32) {
    const int32_t num_threads = num_warps * warp_size;
    return {blocks(most_ids, max_blocks, num_threads, warp_size), num_threads,
            load_plan_shared_bytes(topology, num_warps)};
  }

 private:
  static int32_t blocks(int64_t most_ids, int32_t max_blocks, int32_t num_threads,
                        int32_t warp_size) {
    const int64_t each = int64_t{num_counting(num_threads, warp_size)} * kIdsPerLoadThread;
    return static_cast<int32_t>(max64(1, min64(ceil_div(most_ids, each), max_blocks)));
  }
};

// Whether a group can use these kernels: a launch holds its ranks, and a row fits in shared memory
// and, with far peers (else staging_bytes is 0), in the memory for puts.
inline bool load_fits(int32_t launch_ranks, int32_t num_ranks, int32_t num_experts,
                      int64_t max_shared_bytes, int64_t staging_bytes) {
  return launch_ranks <= kMaxLaunchRanks &&
         load_shared_bytes(num_ranks, num_experts) <= max_shared_bytes &&
         (staging_bytes == 0 || int64_t{4} * num_experts <= staging_bytes);
}

}  // namespace uec::cuda
