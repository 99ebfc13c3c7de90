// What the reroute's kernels are given: arguments, their memory, and what a block shares.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/base/scratch.hpp"
#include "core/reroute/reroute.hpp"
#include "core/reroute/share_table.hpp"
#include "cuda/device/config.hpp"
#include "cuda/device/device_ptr.hpp"

namespace uec::cuda {

// Constants of a group and one of its ranks.
struct RerouteShape {
  int32_t rank = 0;
  int32_t num_ranks = 0;
  int32_t num_experts = 0;
  int32_t slots_per_rank = 0;
  int32_t per_rank = 0;  // P
  int32_t max_runs = 0;  // blocks of a launch
  int32_t window_log2 = kWindowLog2;

  UEC_HD int64_t num_entries() const { return num_experts + int64_t{num_ranks} * slots_per_rank; }
  UEC_HD int64_t row() const { return round_up(num_experts, 4); }  // of counts: whole 16 bytes
  UEC_HD int64_t num_windows() const { return (max_runs >> window_log2) + 1; }
};

// State of one rank, in device memory; zero at first. One launch at a time uses it, and the first
// is that of the shares.
struct RerouteState {
  // Read by each block as it begins, written by the last to finish.
  uint64_t launches = 0;  // that have finished
  uint64_t fault = 0;     // of the present launch: fault_word()
  int32_t entered = 0;    // blocks
  int32_t left = 0;
  // Results of the shares kernel.
  uint64_t plan_fault = 0;
  int32_t shares_left = 0;
  RerouteStatus plan_status;
};

// The arrays behind it. The first three are the host's to fill.
struct RerouteArrays {
  int32_t* home;     // [E]
  int32_t* main_id;  // [E] as InstanceIds has it
  int32_t* slot_id;  // [G]
  ShareTable table;
  uint32_t* counts;   // [max_runs][row] of each run
  uint32_t* sums;     // [windows][row] of all runs up to the last of a window
  uint64_t* counted;  // [max_runs] flags: the launch whose counts are there
  uint64_t* summed;   // [windows] flags

  // Cuts them out behind `state`, which is aligned to 16 bytes. With a null state: the total size.
  UEC_HD static int64_t cut(std::byte* state, const RerouteShape& shape, RerouteArrays* arrays) {
    constexpr int64_t kBehind = round_up(sizeof(RerouteState), 16);
    ScratchCutter cutter(state == nullptr ? nullptr : state + kBehind);
    // Rows are read 16 bytes at a time, so they come first.
    arrays->counts = cutter.take<uint32_t>(shape.max_runs * shape.row());
    arrays->sums = cutter.take<uint32_t>(shape.num_windows() * shape.row());
    arrays->counted = cutter.take<uint64_t>(shape.max_runs);
    arrays->summed = cutter.take<uint64_t>(shape.num_windows());
    arrays->table.entries = cutter.take<ShareEntry>(shape.num_entries());
    arrays->table.begin = cutter.take<int32_t>(shape.num_experts + 1);
    arrays->home = cutter.take<int32_t>(shape.num_experts);
    arrays->main_id = cutter.take<int32_t>(shape.num_experts);
    arrays->slot_id = cutter.take<int32_t>(shape.num_ranks);
    return kBehind + cutter.used_bytes();
  }
};

// Arguments of the kernel that makes the table of shares. Each warp of a block handles one expert.
struct SharesArgs {
  RerouteShape shape;
  DevicePtr<RerouteState> state = 0;
  DevicePtr<const int32_t> load = 0;  // as QuotaPlan has them
  DevicePtr<const int32_t> slot_expert = 0;
  DevicePtr<const int32_t> slot_quota = 0;
  DevicePtr<const int32_t> home_quota = 0;
  DevicePtr<const int32_t> home = 0;  // 0: the group's
};

// What is rerouted.
enum class Routing : int32_t { kNone = 0, kIds, kMap };

// A fault that the host has not taken yet, in host memory that the device can address. Later ones
// are not written: the first explains them.
struct RerouteFaultBox {
  uint64_t routing = 0;  // Routing of the launch that found it. Written last, by publish
  RerouteStatus status;
};

// Arguments of the kernels that use the table. Each block has one run of the ids, or of the
// tokens: as many blocks as it takes, and one if there are none.
//
// After a fault `to` holds nothing but ids of instances and padding, so that what comes next on the
// stream stays inside its arrays.
struct RerouteArgs {
  RerouteShape shape;
  DevicePtr<RerouteState> state = 0;
  DevicePtr<RerouteFaultBox> fault = 0;
  uint64_t from = 0;   // ids, or map [tokens, E]
  uint64_t to = 0;     // ids, not in the same place, or map [tokens, G * P]
  uint64_t probs = 0;  // map only: [tokens, E]; 0: none
  uint64_t physical_probs = 0;
  // Map only: [tokens, E], where a token goes, -1: nowhere; 0: none.
  DevicePtr<int32_t> instances = 0;
  int64_t count = 0;       // ids, or tokens
  int32_t prob_bytes = 0;  // 1, 2, 4 or 8
  Routing routing = Routing::kNone;
};

// What a block of these keeps in shared memory.
struct RerouteShared {
  // Written by one thread, for all.
  struct Entry {
    uint64_t launch;
    int32_t run;
    int32_t refused;  // the plan is no good
  };

  uint32_t* partial;    // [groups][row] sums over some of the runs
  uint16_t* counts;     // [warps][E] of a warp; then of the warps before it
  Entry* entry;         // [1]
  ShareEntry* entries;  // a copy of the table
  int32_t* begin;
  int32_t* base;   // [E] tokens in runs before this one
  int32_t* total;  // [E] tokens in this run
  uint8_t* bits;   // [warps][E] map only: which tokens of the warp have the expert

  // Whole 16 bytes, which are cleared together.
  UEC_HD static int64_t counts_bytes(const RerouteShape& shape, int32_t num_warps) {
    return round_up(int64_t{2} * num_warps * shape.num_experts, 16);
  }

  // Works as RerouteArrays::cut(). `base` is aligned to 16 bytes.
  UEC_HD static int64_t cut(std::byte* base, const RerouteShape& shape, int32_t num_threads,
                            int32_t num_warps, RerouteShared* shared) {
    ScratchCutter cutter(base);
    shared->partial = cutter.take<uint32_t>(max64(4 * num_threads, shape.row()));
    shared->counts = cutter.take<uint16_t>(counts_bytes(shape, num_warps) / 2);
    shared->entry = cutter.take<Entry>(1);
    shared->entries = cutter.take<ShareEntry>(shape.num_entries());
    shared->begin = cutter.take<int32_t>(shape.num_experts + 1);
    shared->base = cutter.take<int32_t>(shape.num_experts);
    shared->total = cutter.take<int32_t>(shape.num_experts);
    shared->bits = cutter.take<uint8_t>(int64_t{num_warps} * shape.num_experts);
    return cutter.used_bytes();
  }
};

// Cuts a warp's ShareScratch, of which a block of the shares' kernel has one for each. Returns the
// bytes.
UEC_HD inline int64_t cut_share_scratch(std::byte* base, const RerouteShape& shape,
                                        ShareScratch* scratch) {
  ScratchCutter cutter(base);
  scratch->turns = cutter.take<Turn>(shape.num_ranks);
  scratch->rank = cutter.take<int32_t>(shape.num_ranks);
  scratch->quota = cutter.take<int32_t>(shape.num_ranks);
  return round_up(cutter.used_bytes(), 8);
}

// How the kernels are launched.
struct RerouteGrid {
  int32_t num_blocks = 0;  // at most max_runs, except for the shares
  int32_t num_threads = 0;
  int64_t shared_bytes = 0;

  static RerouteGrid of_shares(const RerouteShape& shape, int32_t num_threads = kSharesThreads,
                               int32_t warp_size = 32) {
    ShareScratch scratch;
    const int32_t num_warps = num_threads / warp_size;
    return {static_cast<int32_t>(ceil_div(shape.num_experts, num_warps)), num_threads,
            num_warps * cut_share_scratch(nullptr, shape, &scratch)};
  }
  static RerouteGrid of_ids(const RerouteShape& shape, int64_t num_ids,
                            int32_t num_threads = kRerouteThreads, int32_t warp_size = 32) {
    return of_runs(shape, num_ids, num_threads * kIdsPerThread, num_threads, warp_size);
  }
  static RerouteGrid of_map(const RerouteShape& shape, int64_t num_tokens,
                            int32_t num_threads = kRerouteThreads, int32_t warp_size = 32) {
    return of_runs(shape, num_tokens, num_threads / warp_size * kTokensPerWarp, num_threads,
                   warp_size);
  }

 private:
  static RerouteGrid of_runs(const RerouteShape& shape, int64_t count, int64_t per_run,
                             int32_t num_threads, int32_t warp_size) {
    RerouteShared shared;
    return {static_cast<int32_t>(max64(1, ceil_div(count, per_run))), num_threads,
            RerouteShared::cut(nullptr, shape, num_threads, num_threads / warp_size, &shared)};
  }
};

}  // namespace uec::cuda
