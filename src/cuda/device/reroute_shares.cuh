// The kernel that makes a rank's table of shares: a warp for each expert, and no warp waits for
// another.
//
// At 64 ranks and 256 experts it reads 64 KiB of load. The longest chain is that of an expert with
// replicas: two loads from memory, five sums over a warp, a division for every 32 ranks, and one
// multiplication after the other for every rank: about 64 * 40 cycles, 1.5 us.
#pragma once

#include "cuda/device/ptx.cuh"
#include "cuda/device/reroute_args.hpp"
#include "cuda/device/warp.cuh"

namespace uec::cuda {

UEC_DEVICE void reroute_shares(const SharesArgs& args, std::byte* shared_memory) {
  const RerouteShape& shape = args.shape;
  auto& state = *args.state;
  RerouteArrays arrays;
  RerouteArrays::cut(reinterpret_cast<std::byte*>(&state), shape, &arrays);
  Topology topology;
  topology.num_ranks = shape.num_ranks;
  topology.num_experts = shape.num_experts;
  topology.slots_per_rank = shape.slots_per_rank;
  topology.home = arrays.home;
  const QuotaPlan plan{args.load, args.slot_expert, args.slot_quota, args.home_quota, args.home};

  const int32_t warp = ptx::thread_idx() / ptx::kWarpSize;
  const int32_t num_warps = ptx::num_threads() / ptx::kWarpSize;
  const int32_t expert = ptx::block_x() * num_warps + warp;
  if (expert < shape.num_experts) {
    ShareScratch scratch;
    const int64_t bytes = cut_share_scratch(nullptr, shape, &scratch);
    cut_share_scratch(shared_memory + warp * bytes, shape, &scratch);
    const uint64_t fault =
        share_into_table(Warp{}, topology, {shape.per_rank, arrays.main_id, arrays.slot_id}, plan,
                         shape.rank, expert, scratch, arrays.table);
    if (fault != 0) ptx::max_relaxed(&state.plan_fault, fault);
  }
  // The last block to leave records the outcome. Acquire-release: all faults come before that.
  ptx::sync_block();
  if (ptx::thread_idx() != 0) return;
  if (ptx::fetch_add_acq_rel(&state.shares_left, 1) != ptx::num_blocks_x() - 1) return;
  const uint64_t fault = state.plan_fault;
  state.plan_status = fault == 0 ? RerouteStatus{} : explain_plan_fault(topology, plan, fault);
  state.plan_fault = 0;
  state.shares_left = 0;
}

}  // namespace uec::cuda
