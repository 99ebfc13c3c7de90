// A load, summed and sorted by all threads of a block: what sort_load() and sort_mains() of
// core/planner.hpp make with one. An entry's position is the number of those that go before it.
#pragma once

#include "core/planner.hpp"
#include "cuda/args.hpp"
#include "cuda/block_crew.cuh"
#include "cuda/plan_block.hpp"

namespace uec::cuda {

// Sums the sources into block.load, and looks for what the planner does not take. Keeps a copy of
// the load, if one is wanted.
//
// Returns the fault of the first expert that has one, in all threads, and the largest load.
UEC_DEVICE PlanStatus sum_load(const PlanArgs& args, BlockCrew& crew, const PlanBlock& block,
                               int32_t* largest) {
  const auto* const load = reinterpret_cast<const int32_t*>(args.load);
  auto* const kept_load = reinterpret_cast<int32_t*>(args.kept_load);
  constexpr uint32_t kNone = ~0u;
  uint32_t fault = kNone;  // 2 * expert, and 1 if it is too large
  int64_t most = 0;
  for (int32_t e = ptx::thread_idx(); e < args.num_experts; e += ptx::num_threads()) {
    int64_t tokens = 0;
    bool negative = false;
    for (int64_t s = 0; s < args.num_sources; ++s) {
      const int32_t from_source = load[s * args.num_experts + e];
      if (kept_load != nullptr) kept_load[s * args.num_experts + e] = from_source;
      negative |= from_source < 0;
      tokens += from_source;
    }
    block.load[e] = tokens;
    most = max64(most, tokens);
    if (fault == kNone && (negative || tokens > kMaxLoad)) fault = 2 * e + (negative ? 0 : 1);
  }
  fault = Warp::lowest(fault);
  const int32_t* const faults = crew.exchange(static_cast<int32_t>(fault));
  for (int32_t w = 0; w < crew.size(); ++w)
    if (static_cast<uint32_t>(faults[w]) < fault) fault = static_cast<uint32_t>(faults[w]);
  const auto expert = static_cast<int32_t>(fault / 2);
  if (fault != kNone) return {fault % 2 == 0 ? LoadFault::kNegative : LoadFault::kTooMany, expert};

  const uint32_t own = ~Warp::lowest(~static_cast<uint32_t>(most));
  const int32_t* const all = crew.exchange(static_cast<int32_t>(own));
  *largest = 0;
  for (int32_t w = 0; w < crew.size(); ++w) *largest = max32(*largest, all[w]);
  return {};
}

// Every rank's tokens, and its mains by descending load.
UEC_DEVICE void sort_mains(const PlanArgs& args, const PlanBlock& block) {
  const auto* const home = reinterpret_cast<const int32_t*>(args.home);
  const PlannerScratch& s = block.planner;
  for (int32_t r = ptx::thread_idx(); r < args.num_ranks; r += ptx::num_threads()) {
    int64_t tokens = 0;
    for (int32_t i = s.mains_begin[r]; i < s.mains_begin[r + 1]; ++i)
      tokens += block.load[block.by_home[i]];
    s.rank_load[r] = tokens;
  }
  for (int32_t i = ptx::thread_idx(); i < args.num_experts; i += ptx::num_threads()) {
    const int32_t expert = block.by_home[i];
    const int32_t begin = s.mains_begin[home[expert]], end = s.mains_begin[home[expert] + 1];
    int32_t position = begin;
    for (int32_t j = begin; j < end; ++j)
      position += goes_before(block.load, block.by_home[j], expert);
    s.mains[position] = expert;
  }
}

// The fullest rank of every rank's pool, in s.sorted.
UEC_DEVICE void find_leaders(const PlanArgs& args, const PlanBlock& block) {
  const PlannerScratch& s = block.planner;
  for (int32_t r = ptx::thread_idx(); r < args.num_ranks; r += ptx::num_threads()) {
    int32_t leader = r;
    for (int32_t q = 0; q < args.num_ranks; ++q)
      if (block.pool[q] == block.pool[r] && goes_before(s.rank_load, q, leader)) leader = q;
    s.sorted[r] = leader;
  }
}

UEC_DEVICE void sort_ranks(const PlanArgs& args, const PlanBlock& block) {
  const PlannerScratch& s = block.planner;
  for (int32_t r = ptx::thread_idx(); r < args.num_ranks; r += ptx::num_threads()) {
    const int32_t leader = s.sorted[r];
    int32_t position = 0, pool = 0;
    int64_t tokens = 0;
    for (int32_t q = 0; q < args.num_ranks; ++q) {
      const bool same = s.sorted[q] == leader;
      const bool before = goes_before(s.rank_load, same ? q : s.sorted[q], same ? r : leader);
      position += before;
      tokens += before ? s.rank_load[q] : 0;
      pool += before && !same && s.sorted[q] == q;
    }
    s.order[position] = r;
    s.tokens_before[position] = tokens;
    if (leader == r) s.pool_begin[pool] = position;
    if (position < args.num_ranks - 1) continue;
    s.tokens_before[args.num_ranks] = tokens + s.rank_load[r];
    s.pool_begin[pool + 1] = args.num_ranks;
    *block.num_pools = pool + 1;
  }
}

// Of args.load; all threads have the same answer. `sorted` is for a load without fault.
UEC_DEVICE PlanStatus sort_load(const PlanArgs& args, BlockCrew& crew, const PlanBlock& block,
                                SortedLoad* sorted) {
  const PlannerScratch& s = block.planner;
  const auto* const mains_begin = reinterpret_cast<const int32_t*>(args.mains_begin);
  const auto* const mains = reinterpret_cast<const int32_t*>(args.mains);
  const auto* const domain = reinterpret_cast<const int32_t*>(args.domain);
  for (int32_t r = ptx::thread_idx(); r <= args.num_ranks; r += ptx::num_threads()) {
    s.mains_begin[r] = mains_begin[r];
    if (r < args.num_ranks) block.pool[r] = args.allow_cross_domain ? 0 : domain[r];
  }
  for (int32_t i = ptx::thread_idx(); i < args.num_experts; i += ptx::num_threads())
    block.by_home[i] = mains[i];
  const PlanStatus status = sum_load(args, crew, block, &sorted->largest);
  if (status.fault != LoadFault::kNone) return status;
  sort_mains(args, block);
  ptx::sync_block();
  find_leaders(args, block);
  ptx::sync_block();
  sort_ranks(args, block);
  ptx::sync_block();
  sorted->num_pools = *block.num_pools;
  sorted->last_cap = max32(args.max_mains, args.slots_per_rank);
  sorted->pool_begin = s.pool_begin;
  sorted->ranks = s.order;
  sorted->tokens_before = s.tokens_before;
  sorted->load = block.load;
  sorted->mains_begin = s.mains_begin;
  sorted->mains = s.mains;
  if (s.tokens_before[args.num_ranks] > kMaxTotalLoad) return {LoadFault::kTooManyInAll, -1};
  return {};
}

}  // namespace uec::cuda
