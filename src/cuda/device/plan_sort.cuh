// A load, summed and sorted by all threads of a block: the result of sort_load() and
// sort_local_experts() of core/plan/planner.hpp. An entry's position is the number of entries that
// go before it.
#pragma once

#include "core/plan/planner.hpp"
#include "cuda/device/args.hpp"
#include "cuda/device/block_teams.cuh"
#include "cuda/device/plan_block.hpp"

namespace uec::cuda {

// Sums the sources into block.load and those into s.rank_load, and looks for values that the
// planner does not accept. Keeps a copy of the load, if one is wanted.
//
// The same in all threads: 2 * expert, and 1 if it is too large, of the first expert that has a
// fault; else the complement of the largest load, which is above all of those.
inline constexpr uint32_t kNoFault = 1u << 31;

UEC_DEVICE uint32_t sum_load(const PlanArgs& args, BlockTeams& teams, const PlanBlock& block) {
  const int32_t* const load = args.load;
  int32_t* const kept_load = args.kept_load;
  uint32_t found = ~0u;
#pragma unroll 1
  for (int32_t e = ptx::thread_idx(); e < args.num_experts; e += ptx::num_threads()) {
    int64_t tokens = 0;
    bool negative = false;
#pragma unroll 1
    for (int32_t first = 0; first < args.num_sources; first += kSourcesAtOnce) {
      // Issues all loads before the first store, which might alias them: else each would wait for
      // the one before, and there are as many as ranks.
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
    Warp::atomic_add(block.planner.rank_load + block.home[e], tokens);
    const uint32_t fault = 2 * static_cast<uint32_t>(e) + (negative ? 0 : 1);
    found = min_u32(found, negative || tokens > kMaxLoad ? fault : ~static_cast<uint32_t>(tokens));
  }
  return teams.min_sync(found);
}

// Each rank's local experts by descending load.
UEC_DEVICE void sort_local_experts(const PlanArgs& args, const PlanBlock& block) {
  const PlannerScratch& s = block.planner;
#pragma unroll 1
  for (int32_t e = ptx::thread_idx(); e < args.num_experts; e += ptx::num_threads()) {
    const int32_t begin = s.local_begin[block.home[e]], end = s.local_begin[block.home[e] + 1];
    const int64_t own = block.load[e];
    int32_t position = begin;
#pragma unroll 4
    for (int32_t j = begin; j < end; ++j) {
      const int32_t other = block.by_home[j];
      const int64_t tokens = block.load[other];
      position += (tokens > own) | ((tokens == own) & (other < e));
    }
    s.local_experts[position] = e;
    block.local_tokens[position] = static_cast<int32_t>(own);
  }
}

// How many ranks of its pool go before a rank, and their tokens. Each thread compares it with some.
UEC_DEVICE void compare_ranks(const PlanArgs& args, const PlanBlock& block) {
  const int64_t* const rank_load = block.planner.rank_load;
  const int32_t n = args.num_ranks, num_parts = max32(ptx::num_threads() / n, 1);
  const int32_t part = ptx::thread_idx() / n;
#pragma unroll 1
  for (int32_t r = ptx::thread_idx() - part * n; r < n && part < num_parts;
       r += ptx::num_threads()) {
    const int64_t own = rank_load[r];
    const int32_t pool = block.pool[r];
    int32_t before = 0;
    int64_t tokens = 0;
#pragma unroll 4
    for (int32_t q = part; q < n; q += num_parts) {
      const int64_t other = rank_load[q];
      const bool counts = (block.pool[q] == pool) & ((other > own) | ((other == own) & (q < r)));
      before += counts;
      tokens += counts ? other : 0;
    }
    Warp::atomic_add(block.before + r, before);
    Warp::atomic_add(block.tokens_before + r, tokens);
  }
}

// Finds the first rank of each rank's pool, in s.sorted.
UEC_DEVICE void find_leaders(const PlanArgs& args, const PlanBlock& block) {
#pragma unroll 1
  for (int32_t r = ptx::thread_idx(); r < args.num_ranks; r += ptx::num_threads()) {
    int32_t leader = 0;
#pragma unroll 1
    while (block.pool[leader] != block.pool[r] || block.before[leader] > 0) ++leader;
    block.planner.sorted[r] = leader;
  }
}

UEC_DEVICE void place_ranks(const PlanArgs& args, const PlanBlock& block, bool one_pool) {
  const PlannerScratch& s = block.planner;
  const int32_t n = args.num_ranks;
#pragma unroll 1
  for (int32_t r = ptx::thread_idx(); r < n; r += ptx::num_threads()) {
    int32_t position = block.before[r], pool = 0;
    int64_t tokens = block.tokens_before[r];
    const int64_t own = s.rank_load[r];
#pragma unroll 1
    for (int32_t q = 0; q < n && !one_pool; ++q) {
      if (s.sorted[q] == s.sorted[r] || !goes_before(s.rank_load, s.sorted[q], s.sorted[r]))
        continue;
      ++position;
      tokens += s.rank_load[q];
      pool += s.sorted[q] == q;
    }
    s.order[position] = r;
    s.tokens_before[position] = tokens;
    block.rank_tokens[position] = static_cast<int32_t>(own);
    block.rows[position] = {s.local_begin[r], s.local_begin[r + 1] - s.local_begin[r]};
    if (block.before[r] == 0) s.pool_begin[pool] = position;
    if (position < n - 1) continue;
    s.tokens_before[n] = tokens + own;
    s.pool_begin[pool + 1] = n;
    block.sorted->num_pools = pool + 1;
  }
}

// Pads as detail::pad_ranks() of planner.hpp does, without the sort. Returns whether one is needed.
UEC_DEVICE bool pad_ranks(const PlanArgs& args, const PlanBlock& block) {
  const PlannerScratch& s = block.planner;
  const int32_t first = uec::detail::first_padded(args.num_ranks, s);
  if (first == 0) return false;
#pragma unroll 1
  for (int32_t i = ptx::thread_idx(); i < args.num_ranks; i += ptx::num_threads()) {
    const int32_t r = s.order[i];
    s.rank_load[r] += i >= first ? 1 : 0;
    block.before[r] = 0;
    block.tokens_before[r] = 0;
  }
  return true;
}

// What does not depend on the load; and zero, where something is added up.
UEC_DEVICE void copy_constants(const PlanArgs& args, const PlanBlock& block) {
  const PlannerScratch& s = block.planner;
  const int32_t* const home = args.home;
  const int32_t* const local_begin = args.local_begin;
  const int32_t* const local_experts = args.local_experts;
  const int32_t* const domain = args.domain;
  if (ptx::thread_idx() == 0) *block.is_split = 0;
#pragma unroll 1
  for (int32_t r = ptx::thread_idx(); r <= args.num_ranks; r += ptx::num_threads()) {
    s.local_begin[r] = local_begin[r];
    if (r == args.num_ranks) continue;
    block.pool[r] = args.allow_cross_domain ? 0 : domain[r];
    block.before[r] = 0;
    block.tokens_before[r] = s.rank_load[r] = 0;
  }
#pragma unroll 1
  for (int32_t i = ptx::thread_idx(); i < args.num_experts; i += ptx::num_threads()) {
    block.home[i] = home[i];
    block.by_home[i] = local_experts[i];
  }
}

// Sorts args.load into block.sorted if it has no fault. All threads have the same answer.
UEC_DEVICE PlanStatus sort_load(const PlanArgs& args, BlockTeams& teams, const PlanBlock& block) {
  const PlannerScratch& s = block.planner;
  copy_constants(args, block);
  ptx::sync_block();
#pragma unroll 1
  for (int32_t r = ptx::thread_idx(); r < args.num_ranks; r += ptx::num_threads())
    if (block.pool[r] != block.pool[0]) Warp::set(block.is_split);
  // Fields one by one: a whole struct of constants would be a load from memory.
  PlanStatus status;
  const uint32_t found = sum_load(args, teams, block);
  if (found < kNoFault) {
    status.fault = found % 2 == 0 ? LoadFault::kNegative : LoadFault::kTooMany;
    status.expert = static_cast<int32_t>(found / 2);
    return status;
  }
  if (ptx::thread_idx() == 0) {
    SortedLoad& sorted = *block.sorted;  // field by field, as above
    sorted.largest = static_cast<int32_t>(~found);
    sorted.last_cap = max32(args.max_local_experts, args.slots_per_rank);
    sorted.pool_begin = s.pool_begin;
    sorted.ranks = s.order;
    sorted.tokens_before = s.tokens_before;
    sorted.load = block.load;
    sorted.local_begin = s.local_begin;
    sorted.local_experts = s.local_experts;
    sorted.rank_tokens = block.rank_tokens;
    sorted.rows = block.rows;
    sorted.local_tokens = block.local_tokens;
    sorted.max_local_experts = args.max_local_experts;
  }
  const bool is_split = *block.is_split != 0;
  sort_local_experts(args, block);
  for (bool is_padded = false;; is_padded = true) {
    compare_ranks(args, block);
    ptx::sync_block();
    if (is_split) {
      find_leaders(args, block);
      ptx::sync_block();
    }
    place_ranks(args, block, !is_split);
    ptx::sync_block();
    if (is_padded) return status;
    if (s.tokens_before[args.num_ranks] > kMaxTotalLoad) status.fault = LoadFault::kTooManyInAll;
    if (is_split || !args.objective.is_exact() || !pad_ranks(args, block)) return status;
    ptx::sync_block();
  }
}

}  // namespace uec::cuda
