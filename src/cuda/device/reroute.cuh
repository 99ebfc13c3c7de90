// The reroute of ids: one launch, one pass over them.
//
// 65536 ids of 8 bytes are 1 MiB in and out, and 2 MiB of counts from the L2 cache: 1 us. What
// takes time is the chain: draw a run, load, count, publish, observe, sum, store, leave; seven
// round trips to the L2 cache or memory, of 0.5 to 1 us each, and the launch.
#pragma once

#include "cuda/device/reroute_runs.cuh"

namespace uec::cuda {

inline constexpr int32_t kPadding = -1;  // also what is no id
inline constexpr int32_t kBeyond = -2;   // the end

// Each warp has a part of its block's run, row after row of its lanes. What a thread needs of its
// ids stays in registers.
struct ThreadIds {
  int32_t expert[kIdsPerThread];   // or one of the above
  int32_t ordinal[kIdsPerThread];  // among the warp's tokens of the expert
};

// Position of the thread's first id; the next one is a row further.
UEC_DEVICE int64_t first_position(int32_t run) {
  return (int64_t{run} * num_warps() + warp_idx()) * (kIdsPerThread * ptx::kWarpSize) +
         Warp::index();
}

template <class Id>
UEC_DEVICE void load_ids(const RerouteArgs& args, const RerouteBlock& block, ThreadIds& own) {
  const auto* const ids = reinterpret_cast<const Id*>(args.from);
  const int64_t first = first_position(block.run);
  Id id[kIdsPerThread];
#pragma unroll
  for (int32_t i = 0; i < kIdsPerThread; ++i) {
    const int64_t position = first + i * ptx::kWarpSize;
    id[i] = position < args.count ? ids[position] : Id{kPadding};
  }
#pragma unroll
  for (int32_t i = 0; i < kIdsPerThread; ++i) {
    const int64_t position = first + i * ptx::kWarpSize;
    own.expert[i] = position < args.count ? kPadding : kBeyond;
    if (static_cast<uint64_t>(id[i]) < static_cast<uint64_t>(block.shape.num_experts)) {
      own.expert[i] = static_cast<int32_t>(id[i]);
    } else if (id[i] != Id{kPadding}) {
      ptx::max_relaxed(&block.state->fault, fault_word(FaultStage::kId, position));
    }
  }
}

UEC_DEVICE void count_ids(const RerouteBlock& block, ThreadIds& own) {
  uint16_t* const counts = block.shared.counts + warp_idx() * block.shape.num_experts;
  const uint32_t lanes_before = (1u << Warp::index()) - 1;
#pragma unroll
  for (int32_t i = 0; i < kIdsPerThread; ++i) {
    const int32_t expert = own.expert[i];
    const uint32_t same = ptx::match(static_cast<uint32_t>(expert));
    if (expert >= 0) own.ordinal[i] = counts[expert] + ptx::num_set(same & lanes_before);
    ptx::sync_warp();  // all have read what the first of them now replaces
    if (expert >= 0 && (same & lanes_before) == 0)
      counts[expert] = static_cast<uint16_t>(counts[expert] + ptx::num_set(same));
    ptx::sync_warp();
  }
}

// Writes the ids of an invalid plan, which has no instances.
template <class Id>
UEC_DEVICE void store_padding(const RerouteArgs& args, const RerouteBlock& block) {
  auto* const out = reinterpret_cast<Id*>(args.to);
#pragma unroll 1
  for (int64_t i = first_position(block.run), last = i + kIdsPerThread * ptx::kWarpSize;
       i < last && i < args.count; i += ptx::kWarpSize)
    out[i] = Id{kPadding};
}

template <class Id>
UEC_DEVICE void reroute_ids(const RerouteArgs& args, std::byte* shared_memory) {
  RerouteBlock block;
  ThreadIds own;
  const bool is_good = enter(args, shared_memory, block);
  if (is_good) {
    load_ids<Id>(args, block, own);
    count_ids(block, own);
    publish_counts(block);
    sum_runs(block);
    if (block.is_last_run()) check_totals(block);
  }
  leave(args, block, [&](int64_t position) {
    return static_cast<int64_t>(reinterpret_cast<const Id*>(args.from)[position]);
  });
  if (!is_good) return store_padding<Id>(args, block);
  auto* const out = reinterpret_cast<Id*>(args.to) + first_position(block.run);
#pragma unroll
  for (int32_t i = 0; i < kIdsPerThread; ++i)
    if (own.expert[i] != kBeyond)
      out[i * ptx::kWarpSize] = static_cast<Id>(
          own.expert[i] < 0 ? kPadding : instance_of(block, own.expert[i], own.ordinal[i]));
}

}  // namespace uec::cuda
