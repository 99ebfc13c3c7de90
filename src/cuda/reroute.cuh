// The reroute of ids: one launch, one pass over them.
//
// 65536 ids of 8 bytes are 1 MiB in and out, and 2 MiB of counts from the L2 cache: 1 us. What
// takes time is the chain: draw a run, load, count, publish, observe, add up, store, leave; seven
// trips to the L2 cache or memory, of 0.5 to 1 us each, and the launch.
#pragma once

#include "cuda/reroute_runs.cuh"

namespace uec::cuda {

// Of a block's run, each warp has a part: a row of its lanes, and then another. What a thread needs
// of its ids stays in registers.
template <class Id>
struct ThreadIds {
  Id id[kIdsPerThread];
  int32_t ordinal[kIdsPerThread];  // among the warp's tokens of the expert
};

template <class Id>
UEC_DEVICE bool is_expert(Id id, int32_t num_experts) {
  return static_cast<uint64_t>(id) < static_cast<uint64_t>(num_experts);
}

// Position of the thread's first id; the next one is a row further.
UEC_DEVICE int64_t first_position(int32_t run) {
  return (int64_t{run} * num_warps() + warp_idx()) * (kIdsPerThread * ptx::kWarpSize) +
         Warp::index();
}

template <class Id>
UEC_DEVICE ThreadIds<Id> count_ids(const RerouteArgs& args, const RerouteBlock& block) {
  const auto* const ids = reinterpret_cast<const Id*>(args.from);
  const int32_t num_experts = block.shape.num_experts;
  const int64_t first = first_position(block.run);
  uint16_t* const counts = block.shared.counts + warp_idx() * num_experts;
  ThreadIds<Id> own;
  for (int32_t i = 0; i < kIdsPerThread; ++i) {
    const int64_t position = first + i * ptx::kWarpSize;
    own.id[i] = position < args.count ? ids[position] : Id{-1};
    own.ordinal[i] = 0;
  }
  const uint32_t lanes_before = (1u << Warp::index()) - 1;
  for (int32_t i = 0; i < kIdsPerThread; ++i) {
    const Id id = own.id[i];
    const bool counts_it = is_expert(id, num_experts);
    if (!counts_it && id != -1)
      ptx::max_relaxed(&block.state->fault,
                       fault_word(FaultStage::kId, first + i * ptx::kWarpSize));
    const uint32_t same = ptx::match(counts_it ? static_cast<uint32_t>(id) : ~0u);
    if (counts_it) own.ordinal[i] = counts[id] + ptx::num_set(same & lanes_before);
    ptx::sync_warp();  // all have read what the first of them now replaces
    if (counts_it && (same & lanes_before) == 0)
      counts[id] = static_cast<uint16_t>(counts[id] + ptx::num_set(same));
    ptx::sync_warp();
  }
  return own;
}

template <class Id>
UEC_DEVICE void reroute_ids(const RerouteArgs& args, std::byte* shared_memory) {
  RerouteBlock block;
  const auto* const ids = reinterpret_cast<const Id*>(args.from);
  if (enter(args, shared_memory, block)) {
    const ThreadIds<Id> own = count_ids<Id>(args, block);
    publish_counts(block);
    sum_runs(block);
    if (block.is_last_run()) check_totals(block);
    auto* const out = reinterpret_cast<Id*>(args.to);
    const int64_t first = first_position(block.run);
    for (int32_t i = 0; i < kIdsPerThread; ++i) {
      const int64_t position = first + i * ptx::kWarpSize;
      const Id id = own.id[i];
      if (position >= args.count) continue;
      if (is_expert(id, block.shape.num_experts))
        out[position] =
            static_cast<Id>(instance_of(block, static_cast<int32_t>(id), own.ordinal[i]));
      else if (id == -1)
        out[position] = -1;  // what is no id stays, for the status to name it
    }
  }
  leave(args, block, [ids](int64_t position) { return static_cast<int64_t>(ids[position]); });
}

}  // namespace uec::cuda
