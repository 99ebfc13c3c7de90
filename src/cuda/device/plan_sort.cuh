// A load, summed and sorted by all threads of a block: the result of sort_load() and sort_mains()
// of core/plan/planner.hpp. An entry's position is the number of entries that go before it.
#pragma once

#include "core/plan/planner.hpp"
#include "cuda/device/args.hpp"
#include "cuda/device/block_crew.cuh"
#include "cuda/device/plan_block.hpp"

namespace uec::cuda {

// Sums the sources into block.load, and looks for values that the planner does not accept. Keeps a
// copy of the load, if one is wanted.
//
// The same in all threads: 2 * expert, and 1 if it is too large, of the first expert that has a
// fault, or kNoFault; and the largest load.
inline constexpr uint32_t kNoFault = ~0u;

UEC_DEVICE uint32_t sum_load(const PlanArgs& args, BlockCrew& crew, const PlanBlock& block,
                             int32_t* largest) {
  const auto* const load = reinterpret_cast<const int32_t*>(args.load);
  auto* const kept_load = reinterpret_cast<int32_t*>(args.kept_load);
  uint32_t fault = kNoFault;
  int64_t most = 0;
#pragma unroll 1
  for (int32_t e = ptx::thread_idx(); e < args.num_experts; e += ptx::num_threads()) {
    int64_t tokens = 0;
    bool negative = false;
#pragma unroll 1
    for (int32_t first = 0; first < args.num_sources; first += kSourcesAtOnce) {
      // All loads before the first store, which might alias them: else each would wait for the one
      // before, and there are as many as ranks.
      int32_t from_source[kSourcesAtOnce];
      const int64_t at = int64_t{first} * args.num_experts + e;
#pragma unroll
      for (int32_t i = 0; i < kSourcesAtOnce; ++i)
        from_source[i] =
            first + i < args.num_sources ? load[at + int64_t{i} * args.num_experts] : 0;
#pragma unroll
      for (int32_t i = 0; i < kSourcesAtOnce; ++i) {
        if (kept_load != nullptr && first + i < args.num_sources)
          kept_load[at + int64_t{i} * args.num_experts] = from_source[i];
        negative |= from_source[i] < 0;
        tokens += from_source[i];
      }
    }
    block.load[e] = tokens;
    most = max64(most, tokens);
    if (fault == kNoFault && (negative || tokens > kMaxLoad))
      fault = 2 * static_cast<uint32_t>(e) + (negative ? 0 : 1);
  }
  fault = Warp::lowest(fault);
  const int32_t* const faults = crew.exchange(static_cast<int32_t>(fault));
#pragma unroll 1
  for (int32_t w = 0; w < crew.size(); ++w)
    if (static_cast<uint32_t>(faults[w]) < fault) fault = static_cast<uint32_t>(faults[w]);
  if (fault != kNoFault) return fault;

  const uint32_t own = ~Warp::lowest(~static_cast<uint32_t>(most));
  const int32_t* const all = crew.exchange(static_cast<int32_t>(own));
  *largest = 0;
#pragma unroll 1
  for (int32_t w = 0; w < crew.size(); ++w) *largest = max32(*largest, all[w]);
  return kNoFault;
}

// Every rank's tokens, and its mains by descending load.
UEC_DEVICE void sort_mains(const PlanArgs& args, const PlanBlock& block) {
  const PlannerScratch& s = block.planner;
#pragma unroll 1
  for (int32_t r = ptx::thread_idx(); r < args.num_ranks; r += ptx::num_threads()) {
    int64_t tokens = 0;
#pragma unroll 1
    for (int32_t i = s.mains_begin[r]; i < s.mains_begin[r + 1]; ++i)
      tokens += block.load[block.by_home[i]];
    s.rank_load[r] = tokens;
  }
#pragma unroll 1
  for (int32_t e = ptx::thread_idx(); e < args.num_experts; e += ptx::num_threads()) {
    const int32_t begin = s.mains_begin[block.home[e]], end = s.mains_begin[block.home[e] + 1];
    int32_t position = begin;
#pragma unroll 1
    for (int32_t j = begin; j < end; ++j) position += goes_before(block.load, block.by_home[j], e);
    s.mains[position] = e;
    block.main_tokens[position] = static_cast<int32_t>(block.load[e]);
  }
}

// A warp for each rank: the fullest rank of its pool, in s.sorted.
UEC_DEVICE void find_leaders(const PlanArgs& args, const PlanBlock& block) {
  const PlannerScratch& s = block.planner;
#pragma unroll 1
  for (int32_t r = BlockCrew::index(); r < args.num_ranks; r += BlockCrew::size()) {
    int32_t own = r;
#pragma unroll 1
    for (int32_t q = Warp::index(); q < args.num_ranks; q += Warp::size())
      if (block.pool[q] == block.pool[r] && goes_before(s.rank_load, q, own)) own = q;
    const auto tokens = static_cast<uint64_t>(s.rank_load[own]);
    const bool is_fullest = tokens == highest(Warp{}, tokens);
    const uint32_t leader = Warp::lowest(is_fullest ? static_cast<uint32_t>(own) : ~0u);
    if (Warp::leader()) s.sorted[r] = static_cast<int32_t>(leader);
  }
}

// A warp for each rank: its position, by the number of those before it.
UEC_DEVICE void sort_ranks(const PlanArgs& args, const PlanBlock& block) {
  const PlannerScratch& s = block.planner;
#pragma unroll 1
  for (int32_t r = BlockCrew::index(); r < args.num_ranks; r += BlockCrew::size()) {
    const int32_t leader = s.sorted[r];
    uint32_t ranks_before = 0, pools_before = 0;
    uint64_t tokens_before = 0;
#pragma unroll 1
    for (int32_t q = Warp::index(); q < args.num_ranks; q += Warp::size()) {
      const bool same = s.sorted[q] == leader;
      const bool before = goes_before(s.rank_load, same ? q : s.sorted[q], same ? r : leader);
      ranks_before += before;
      tokens_before += before ? static_cast<uint64_t>(s.rank_load[q]) : 0;
      pools_before += before && !same && s.sorted[q] == q;
    }
    const auto position = static_cast<int32_t>(Warp::sum(ranks_before));
    const auto pool = static_cast<int32_t>(Warp::sum(pools_before));
    const auto tokens = static_cast<int64_t>(Warp::sum(tokens_before));
    if (!Warp::leader()) continue;
    const int32_t begin = s.mains_begin[r];
    s.order[position] = r;
    s.tokens_before[position] = tokens;
    block.rank_tokens[position] = static_cast<int32_t>(s.rank_load[r]);
    block.rows[position] = {begin, s.mains_begin[r + 1] - begin};
    if (leader == r) s.pool_begin[pool] = position;
    if (position < args.num_ranks - 1) continue;
    s.tokens_before[args.num_ranks] = tokens + s.rank_load[r];
    s.pool_begin[pool + 1] = args.num_ranks;
    *block.num_pools = pool + 1;
  }
}

// Of args.load, into block.sorted if it has no fault. All threads have the same answer.
UEC_DEVICE PlanStatus sort_load(const PlanArgs& args, BlockCrew& crew, const PlanBlock& block) {
  const PlannerScratch& s = block.planner;
  const auto* const home = reinterpret_cast<const int32_t*>(args.home);
  const auto* const mains_begin = reinterpret_cast<const int32_t*>(args.mains_begin);
  const auto* const mains = reinterpret_cast<const int32_t*>(args.mains);
  const auto* const domain = reinterpret_cast<const int32_t*>(args.domain);
#pragma unroll 1
  for (int32_t r = ptx::thread_idx(); r <= args.num_ranks; r += ptx::num_threads()) {
    s.mains_begin[r] = mains_begin[r];
    if (r < args.num_ranks) block.pool[r] = args.allow_cross_domain ? 0 : domain[r];
  }
#pragma unroll 1
  for (int32_t i = ptx::thread_idx(); i < args.num_experts; i += ptx::num_threads()) {
    block.home[i] = home[i];
    block.by_home[i] = mains[i];
  }
  // Fields one by one: a whole struct of constants would be a load from memory.
  PlanStatus status;
  int32_t largest;
  const uint32_t fault = sum_load(args, crew, block, &largest);
  if (fault != kNoFault) {
    status.fault = fault % 2 == 0 ? LoadFault::kNegative : LoadFault::kTooMany;
    status.expert = static_cast<int32_t>(fault / 2);
    return status;
  }
  sort_mains(args, block);
  ptx::sync_block();
  find_leaders(args, block);
  ptx::sync_block();
  sort_ranks(args, block);
  ptx::sync_block();
  if (ptx::thread_idx() == 0) {
    SortedLoad& sorted = *block.sorted;  // field by field, as above
    sorted.num_pools = *block.num_pools;
    sorted.largest = largest;
    sorted.last_cap = max32(args.max_mains, args.slots_per_rank);
    sorted.pool_begin = s.pool_begin;
    sorted.ranks = s.order;
    sorted.tokens_before = s.tokens_before;
    sorted.load = block.load;
    sorted.mains_begin = s.mains_begin;
    sorted.mains = s.mains;
    sorted.rank_tokens = block.rank_tokens;
    sorted.rows = block.rows;
    sorted.main_tokens = block.main_tokens;
    sorted.max_mains = args.max_mains;
  }
  ptx::sync_block();
  if (s.tokens_before[args.num_ranks] > kMaxTotalLoad) status.fault = LoadFault::kTooManyInAll;
  return status;
}

}  // namespace uec::cuda
