// The planner: from the exact load of a microbatch to replicas and quotas.
//
// The readable definition of the same algorithm is `tests/reference/planner.py`; the two agree in
// every integer, and the tests hold them to it. Integers only, every tie broken by order or id: the
// result is the same on every rank, host and device. A plan is the best of a fixed set of probes
// (probe.hpp), which may run in parallel (search.hpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/base/common.hpp"
#include "core/base/local_experts.hpp"
#include "core/base/scratch.hpp"
#include "core/plan/search.hpp"

namespace uec {

// ---------------------------------------------------------------------------------------------
// Contract

inline constexpr int64_t kMaxTotalLoad = (int64_t{1} << 40) - 1;

// Working memory for a plan made by `num_teams` teams in parallel. `memory` is aligned to 8 bytes
// and has planner_scratch_bytes() bytes. Nothing in it needs to be initialised, and nothing in it
// outlives the call.
struct PlannerScratch {
  int64_t* rank_load;      // [G] tokens on a rank without replicas
  int64_t* tokens_before;  // [G + 1] of the ranks in `order`, running sums
  int32_t* pool_begin;     // [G + 1] where a pool begins in `order`
  int32_t* order;          // [G] the ranks by pool, then descending load, then id
  int32_t* sorted;         // [G] while pools are made
  int32_t* local_begin;    // [G + 1]
  int32_t* local_experts;  // [E] local experts by home, a hot rank's by descending load
  std::byte* teams;        // of TeamScratch, or of as many bytes as each team needs
  int64_t team_bytes;
  int64_t bytes;

  UEC_HD PlannerScratch(const Topology& topology, std::byte* memory, int32_t num_teams = 1,
                        int64_t least_team_bytes = 0) {
    const int64_t g = topology.num_ranks;
    ScratchCutter cutter(memory);
    rank_load = cutter.take<int64_t>(g);
    tokens_before = cutter.take<int64_t>(g + 1);
    pool_begin = cutter.take<int32_t>(g + 1);
    order = cutter.take<int32_t>(g);
    sorted = cutter.take<int32_t>(g);
    local_begin = cutter.take<int32_t>(g + 1);
    local_experts = cutter.take<int32_t>(topology.num_experts);
    team_bytes = max64(TeamScratch(topology, nullptr).bytes, least_team_bytes);
    teams = cutter.take_bytes(num_teams * team_bytes);
    bytes = cutter.used_bytes();
  }

  UEC_HD std::byte* of_team(int32_t index) const { return teams + index * team_bytes; }
  UEC_HD TeamScratch team(const Topology& topology, int32_t index) const {
    return TeamScratch(topology, of_team(index));
  }
};

UEC_HD inline int64_t planner_scratch_bytes(const Topology& topology, int32_t num_teams = 1,
                                            int64_t least_team_bytes = 0) {
  return PlannerScratch(topology, nullptr, num_teams, least_team_bytes).bytes;
}

// Chooses the replicas and every instance's quota for one microbatch.
//
//   load        [E] tokens of each expert over all source ranks, 0 <= load <= kMaxLoad, in all at
//               most kMaxTotalLoad
//   slot_expert [G, S] out: expert in the slot or -1; a rank's slots are filled from 0
//   slot_quota  [G, S] out: tokens of that replica; 0 where the slot is empty, never 0 elsewhere
//   home_quota  [E] out: tokens that stay on the main instance
//
// Guarantees: the quotas of an expert's instances sum to its load; no rank has two
// instances of an expert; replicas are where Topology::may_hold allows; only ranks above the
// threshold (for an exact plan, above the mean) export, and such a rank imports only in a chain
// (see probe()); the largest rank quota is at most that of no replication.
UEC_HD inline void plan_replicas(const Topology& topology, const int64_t* load,
                                 const Objective& objective, const PlannerScratch& scratch,
                                 int32_t* slot_expert, int32_t* slot_quota, int32_t* home_quota);

// ---------------------------------------------------------------------------------------------
// Implementation

// The order of ranks and of local experts: by descending key, then ascending id.
UEC_HD inline bool goes_before(const int64_t* key, int32_t a, int32_t b) {
  return key[a] > key[b] || (key[a] == key[b] && a < b);
}

namespace detail {

inline constexpr int32_t kIdBits = 24;  // of a rank, in a word with its load
static_assert(kMaxTotalLoad >> (64 - kIdBits) == 0);

// Shell sort: no recursion, no extra memory, and on the few local experts of one rank it is plain
// insertion sort.
template <class T, class Before>
UEC_HD void sort(T* values, int32_t count, const Before& before) {
  int32_t gap = 1;
  while (gap < count / 3) gap = 3 * gap + 1;
  for (; gap > 0; gap /= 3) {
    for (int32_t i = gap; i < count; ++i) {
      const T value = values[i];
      int32_t j = i;
      for (; j >= gap && !before(values[j - gap], value); j -= gap) values[j] = values[j - gap];
      values[j] = value;
    }
  }
}

// Orders the ranks by pool, and each pool's by descending load. Returns how many pools there are.
// O(G * pools).
UEC_HD inline int32_t sort_ranks(const Topology& topology, const PlannerScratch& s) {
  const int32_t num_ranks = topology.num_ranks;
  // Packs ranks into words in the order of goes_before(): they sort in half the time.
  auto* const words = reinterpret_cast<uint64_t*>(s.tokens_before);
  for (int32_t r = 0; r < num_ranks; ++r)
    words[r] = ~static_cast<uint64_t>(s.rank_load[r]) << kIdBits | static_cast<uint32_t>(r);
  sort(words, num_ranks, [](uint64_t a, uint64_t b) { return a < b; });
  for (int32_t i = 0; i < num_ranks; ++i)
    s.sorted[i] = static_cast<int32_t>(words[i] & ((1u << kIdBits) - 1));
  int32_t num_pools = 0, placed = 0;
  int64_t tokens = 0;
  s.pool_begin[0] = 0;
  for (int32_t first = 0; placed < num_ranks; ++first) {
    const int32_t leader = s.sorted[first];
    if (leader < 0) continue;  // its pool is placed already
    const int32_t domain = topology.domain[leader];
    for (int32_t i = first; i < num_ranks; ++i) {
      const int32_t r = s.sorted[i];
      if (r < 0 || !(topology.allow_cross_domain || topology.domain[r] == domain)) continue;
      s.tokens_before[placed] = tokens;
      s.order[placed++] = r;
      tokens += s.rank_load[r];
      s.sorted[i] = -1;
    }
    s.pool_begin[++num_pools] = placed;
  }
  s.tokens_before[num_ranks] = tokens;
  return num_pools;
}

// The first of the sorted ranks of a single pool that count a token more in an exact plan, as all
// after it do; 0: none do. So the mean is a whole number, and a plan that brings all ranks down to
// it leaves each its floor or its ceiling.
UEC_HD inline int32_t first_padded(int32_t num_ranks, const PlannerScratch& s) {
  const auto total = static_cast<uint64_t>(s.tokens_before[num_ranks]);
  return static_cast<int32_t>(total % static_cast<uint32_t>(num_ranks));
}

// Sorts the ranks again if any are padded.
UEC_HD inline void pad_ranks(const Topology& topology, const PlannerScratch& s) {
  const int32_t first = first_padded(topology.num_ranks, s);
  if (first == 0) return;
  for (int32_t i = first; i < topology.num_ranks; ++i) ++s.rank_load[s.order[i]];
  sort_ranks(topology, s);
}

UEC_HD inline SortedLoad sort_load(const Topology& topology, const int64_t* load,
                                   const PlannerScratch& s) {
  int64_t largest = 0;
  for (int32_t r = 0; r < topology.num_ranks; ++r) s.rank_load[r] = 0;
  for (int32_t e = 0; e < topology.num_experts; ++e) {
    const int64_t tokens = load[e];  // once: the sum might alias it
    s.rank_load[topology.home[e]] += tokens;
    largest = max64(largest, tokens);
  }
  SortedLoad sorted;
  sorted.num_pools = sort_ranks(topology, s);
  sorted.largest = static_cast<int32_t>(largest);
  sorted.pool_begin = s.pool_begin;
  sorted.ranks = s.order;
  sorted.tokens_before = s.tokens_before;
  sorted.load = load;
  sorted.local_begin = s.local_begin;
  sorted.local_experts = s.local_experts;
  return sorted;
}

// Sorts the local experts of ranks above the threshold, as probes of it and of any higher one need.
UEC_HD inline void sort_local_experts(const Topology& topology, int64_t threshold,
                                      const PlannerScratch& s, SortedLoad* sorted) {
  const int32_t max_local_experts = group_local_experts(topology, s.local_begin, s.local_experts);
  sorted->last_cap = max32(max_local_experts, topology.slots_per_rank);
  for (int32_t r = 0, end = topology.num_ranks; r < end; ++r) {
    if (s.rank_load[r] <= threshold) continue;
    const int32_t begin = s.local_begin[r];
    sort(s.local_experts + begin, s.local_begin[r + 1] - begin,
         [&](int32_t a, int32_t b) { return goes_before(sorted->load, a, b); });
  }
}

}  // namespace detail

UEC_HD inline void plan_replicas(const Topology& topology, const int64_t* load,
                                 const Objective& objective, const PlannerScratch& scratch,
                                 int32_t* slot_expert, int32_t* slot_quota, int32_t* home_quota) {
  const int32_t slots = topology.slots_per_rank;
  const int32_t num_slots = topology.num_ranks * slots, num_experts = topology.num_experts;
  for (int32_t i = 0; i < num_slots; ++i) {
    slot_expert[i] = -1;
    slot_quota[i] = 0;
  }
  for (int32_t e = 0; e < num_experts; ++e) home_quota[e] = static_cast<int32_t>(load[e]);
  if (slots == 0) return;
  SortedLoad sorted = detail::sort_load(topology, load, scratch);
  if (objective.is_exact() && sorted.num_pools == 1) detail::pad_ranks(topology, scratch);
  const Goal goal = find_goal(SingleThread{}, sorted, objective);
  if (goal.is_met) return;
  detail::sort_local_experts(topology, goal.mean, scratch, &sorted);
  SingleTeam teams;
  search_plan(teams, sorted, objective, goal, slots, scratch.team(topology, 0),
              {slot_expert, slot_quota, home_quota});
}

}  // namespace uec
