// The planner: from the exact load of a microbatch to replicas and quotas.
//
// The readable definition of the same algorithm is `ultraep_comm/planner.py`; the two agree in
// every integer, and the tests hold them to it. Integers only, every tie broken by order or id: the
// result is the same on every rank, host and device. A plan is the best of a fixed set of probes
// (probe.hpp), which may run side by side.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/common.hpp"
#include "core/mains.hpp"
#include "core/probe.hpp"
#include "core/scratch.hpp"

namespace uec {

// ---------------------------------------------------------------------------------------------
// Contract

inline constexpr int64_t kPpm = 1'000'000;
inline constexpr int64_t kMaxTargetPpm = 1000 * kPpm;
inline constexpr int64_t kMaxTotalLoad = (int64_t{1} << 40) - 1;

// What to look for.
//
// By target: first the least imbalance (largest rank quota over the mean), down to the target; then
// the least transfer, max(experts that a rank exports, replicas that it imports); then the fewest
// replicas; then, what is free, still less imbalance.
//
// By cost: the least per_token * (tokens of the fullest rank) + per_transfer * transfer +
// per_replica * replicas.
struct Objective {
  int64_t target_ppm = 1'010'000;  // in millionths, kPpm to kMaxTargetPpm
  bool by_cost = false;            // then the target counts for nothing, and these do
  int64_t per_token = 0;           // below 2^22
  int64_t per_transfer = 0;        // below 2^40
  int64_t per_replica = 0;         // below 2^40
};

// Working memory of plan_replicas(). `memory` is aligned to 8 bytes and has planner_scratch_bytes()
// bytes: 48 G + 12 E + 24 G S + 8. Nothing in it needs to be initialised, and nothing in it
// outlives the call. Where probes run side by side, each needs its own `have`, `cool` and `trial`.
struct PlannerScratch {
  int64_t* rank_load;    // [G] tokens on a rank without replicas
  int64_t* pool_load;    // [G] tokens of a pool
  int64_t* have;         // [E]
  CoolRank* cool;        // [G]
  int32_t* pool_begin;   // [G + 1] where a pool begins in `order`
  int32_t* order;        // [G] the ranks by pool, then descending load, then id
  int32_t* sorted;       // [G] the ranks by descending load, then id
  int32_t* mains_begin;  // [G + 1]
  int32_t* mains;        // [E] mains by home, a hot rank's by descending load
  Replica* trial;        // [G * S]
  Replica* best;         // [G * S]
  int64_t bytes;

  UEC_HD PlannerScratch(const Topology& topology, std::byte* memory) {
    const int64_t g = topology.num_ranks;
    const int64_t num_slots = g * topology.slots_per_rank;
    ScratchCutter cutter(memory);
    rank_load = cutter.take<int64_t>(g);
    pool_load = cutter.take<int64_t>(g);
    have = cutter.take<int64_t>(topology.num_experts);
    cool = cutter.take<CoolRank>(g);
    pool_begin = cutter.take<int32_t>(g + 1);
    order = cutter.take<int32_t>(g);
    sorted = cutter.take<int32_t>(g);
    mains_begin = cutter.take<int32_t>(g + 1);
    mains = cutter.take<int32_t>(topology.num_experts);
    trial = cutter.take<Replica>(num_slots);
    best = cutter.take<Replica>(num_slots);
    bytes = cutter.used_bytes();
  }
};

UEC_HD inline int64_t planner_scratch_bytes(const Topology& topology) {
  return PlannerScratch(topology, nullptr).bytes;
}

// Chooses the replicas and every instance's quota for one microbatch.
//
//   load        [E] tokens of each expert over all source ranks, 0 <= load <= kMaxLoad, in all at
//               most kMaxTotalLoad
//   slot_expert [G, S] out: expert in the slot or -1; a rank's slots are filled from 0
//   slot_quota  [G, S] out: tokens of that replica; 0 where the slot is empty, never 0 elsewhere
//   home_quota  [E] out: tokens that stay on the main instance
//
// What holds of the result: the quotas of an expert's instances sum to its load; no rank has two
// instances of an expert; replicas are where Topology::may_hold allows; only ranks above the
// threshold export, and such a rank imports only in a chain (see probe()); the largest rank quota
// is at most that of no replication.
//
// Steps: with n = log2(4096 G), c = S + log2(M / S) + 2 caps and at most M mains on a rank, a pool
// takes at most 9 (2 n + 2 + c) + 6 probes by target, and 9 (14 c + 1) by cost. By target it is
// nearly always ten.
UEC_HD inline void plan_replicas(const Topology& topology, const int64_t* load,
                                 const Objective& objective, PlannerScratch scratch,
                                 int32_t* slot_expert, int32_t* slot_quota, int32_t* home_quota);

// ---------------------------------------------------------------------------------------------
// Implementation

namespace detail {

// Sorts ids by descending key, then ascending id. Shell sort: no recursion, no memory, and on the
// few mains of one rank it is plain insertion sort.
UEC_HD inline void sort_descending(int32_t* ids, int32_t count, const int64_t* key) {
  int32_t gap = 1;
  while (gap < count / 3) gap = 3 * gap + 1;
  for (; gap > 0; gap /= 3) {
    for (int32_t i = gap; i < count; ++i) {
      const int32_t id = ids[i];
      int32_t j = i;
      for (; j >= gap; j -= gap) {
        const int32_t other = ids[j - gap];
        if (key[other] > key[id] || (key[other] == key[id] && other < id)) break;
        ids[j] = other;
      }
      ids[j] = id;
    }
  }
}

// Orders the ranks by pool (ranks that may hold each other's experts: a domain, or all ranks where
// plans may cross domains), and each pool's by descending load. Pools are numbered by their fullest
// rank. Returns how many there are. O(G * pools).
UEC_HD inline int32_t sort_ranks(const Topology& topology, const PlannerScratch& s) {
  const int32_t num_ranks = topology.num_ranks;
  for (int32_t r = 0; r < num_ranks; ++r) s.sorted[r] = r;
  sort_descending(s.sorted, num_ranks, s.rank_load);
  int32_t num_pools = 0, placed = 0;
  s.pool_begin[0] = 0;
  for (int32_t first = 0; placed < num_ranks; ++first) {
    const int32_t leader = s.sorted[first];
    if (leader < 0) continue;  // its pool is placed already
    s.pool_load[num_pools] = 0;
    for (int32_t i = first; i < num_ranks; ++i) {
      const int32_t r = s.sorted[i];
      if (r < 0 || !(topology.allow_cross_domain || topology.domain[r] == topology.domain[leader]))
        continue;
      s.order[placed++] = r;
      s.pool_load[num_pools] += s.rank_load[r];
      s.sorted[i] = -1;
    }
    s.pool_begin[++num_pools] = placed;
  }
  return num_pools;
}

// floor(total / num_ranks * target), exactly. The quotient is split off first because total * ppm
// may pass 2^63; the remainder is below num_ranks * 10^6, and times at most 10^9 it stays below
// 2^63 for up to 9,000 ranks.
UEC_HD inline int64_t target_threshold(int64_t total, int32_t num_ranks, int64_t target_ppm) {
  const int64_t unit = num_ranks * kPpm;
  return total / unit * target_ppm + total % unit * target_ppm / unit;
}

// Caps are tried one by one up to the number of slots, then doubled.
UEC_HD constexpr int32_t next_cap(int32_t cap, int32_t slots) {
  return cap < slots ? cap + 1 : 2 * cap;
}

// The search in one pool. Each could be another worker's.
struct PoolSearch {
  Pool pool;
  PlannerScratch& s;
  int32_t slots;
  int32_t last_cap;  // from which on a cap caps nothing

  struct Found {
    int32_t num_replicas, variant;  // -1: none
  };

  UEC_HD int32_t run(int64_t threshold, int32_t cap, int32_t variant) {
    const int32_t imports = cap < slots ? cap : slots;
    return probe(pool, {threshold, imports, cap, variant}, {s.have, s.cool}, s.trial);
  }
  UEC_HD void keep_trial() {
    Replica* const kept = s.trial;
    s.trial = s.best;
    s.best = kept;
  }
  UEC_HD bool reaches(int64_t threshold) {
    for (int32_t v = 0; v < kNumVariants; ++v)
      if (run(threshold, last_cap, v) >= 0) return true;
    return false;
  }

  // The lowest threshold from `wanted` up that some probe reaches, to one part in 4,096. Gallops
  // away from the low end, where the answer nearly always is, then bisects. (More room does not
  // always help a greedy: the nearest success is a better guide than the middle, and where `wanted`
  // is out of reach the `mean` may not be.)
  UEC_HD int64_t lowest_threshold(int64_t wanted, int64_t mean) {
    const int64_t unit = max64(wanted / 4096, 1);
    int64_t low = wanted - unit, high = wanted, step = unit;  // `low`: no plan, or not wanted
    if (reaches(high)) return high;
    if (mean < wanted && reaches(mean)) return mean;
    for (;;) {
      low = high;
      high = min64(low + step, pool.fullest());  // which needs no replica
      step *= 2;
      if (high == pool.fullest() || reaches(high)) break;
    }
    while (high - low > unit) {
      const int64_t middle = low + (high - low) / 2;
      (reaches(middle) ? high : low) = middle;
    }
    return high;
  }

  // The lowest cap below which some rank could not shed its excess.
  UEC_HD int32_t least_cap(int64_t threshold) const {
    int32_t cap = 1;
    for (int32_t i = 0; i < pool.num_ranks; ++i) {
      const int32_t* const mains = pool.mains + pool.mains_begin[pool.ranks[i]];
      int64_t excess = pool.rank_load[pool.ranks[i]] - threshold;
      int32_t n = 0;
      for (; excess > 0; ++n) excess -= pool.load[mains[n]];
      if (cap < n) cap = n;
    }
    return cap;
  }

  // The plan with the fewest replicas, in s.best: of the first style that finds any, since later
  // ones send more.
  UEC_HD Found fewest(int64_t threshold, int32_t cap) {
    Found found{-1, -1};
    for (int32_t v = 0; v < kNumVariants; ++v) {
      if (v % kNumOrders == 0 && found.variant >= 0) break;
      const int32_t count = run(threshold, cap, v);
      if (count < 0 || (found.variant >= 0 && count >= found.num_replicas)) continue;
      found = {count, v};
      keep_trial();
    }
    return found;
  }

  // By target: leaves the plan in s.best and returns its number of replicas.
  UEC_HD int32_t plan(int64_t wanted, int64_t mean) {
    int64_t high = lowest_threshold(wanted, mean);
    Found found{0, -1};
    int32_t cap = least_cap(high);
    for (; cap < 2 * last_cap; cap = next_cap(cap, slots)) {
      found = fewest(high, cap);
      if (found.variant >= 0) break;
    }
    if (found.num_replicas <= 0) return 0;
    // What is free: with the same cap and no more replicas, less imbalance.
    int64_t low = mean - 1;
    for (int32_t i = 0; i < 6 && high - low > 1; ++i) {
      const int64_t middle = low + (high - low) / 2;
      const int32_t count = run(middle, cap, found.variant);
      if (count >= 0 && count <= found.num_replicas) {
        high = middle;
        found.num_replicas = count;
        keep_trial();
      } else {
        low = middle;
      }
    }
    return found.num_replicas;
  }
};

// What all pools share.
struct Planner {
  const Topology& topology;
  const int64_t* load;
  PlannerScratch& s;
  int32_t num_pools = 0;
  int64_t largest = 0;  // tokens of the largest expert
  int64_t mean = 0;     // tokens that some rank has under any plan: the largest mean of a pool
  int64_t fullest = 0;  // tokens of the fullest rank without replicas
  int32_t last_cap = 0;

  UEC_HD int64_t pool_mean(int32_t p) const {
    return ceil_div(s.pool_load[p], s.pool_begin[p + 1] - s.pool_begin[p]);
  }

  UEC_HD PoolSearch search(int32_t p) const {
    const Pool pool{s.order + s.pool_begin[p],
                    s.pool_begin[p + 1] - s.pool_begin[p],
                    load,
                    s.rank_load,
                    s.mains_begin,
                    s.mains,
                    largest};
    return {pool, s, topology.slots_per_rank, last_cap};
  }

  // Returns the tokens in all.
  UEC_HD int64_t begin() {
    for (int32_t r = 0; r < topology.num_ranks; ++r) s.rank_load[r] = 0;
    for (int32_t e = 0; e < topology.num_experts; ++e) {
      s.rank_load[topology.home[e]] += load[e];
      largest = max64(largest, load[e]);
    }
    num_pools = sort_ranks(topology, s);
    int64_t total = 0;
    for (int32_t p = 0; p < num_pools; ++p) {
      total += s.pool_load[p];
      mean = max64(mean, pool_mean(p));
    }
    fullest = s.rank_load[s.order[0]];
    return total;
  }

  // Ranks above the threshold get their mains sorted, as probes of it and of all above it need.
  UEC_HD void sort_mains(int64_t threshold) {
    last_cap = group_mains(topology, s.mains_begin, s.mains);
    if (last_cap < topology.slots_per_rank) last_cap = topology.slots_per_rank;
    for (int32_t r = 0; r < topology.num_ranks; ++r) {
      const int32_t begin = s.mains_begin[r];
      if (s.rank_load[r] > threshold)
        sort_descending(s.mains + begin, s.mains_begin[r + 1] - begin, load);
    }
  }

  // The cheapest of a fixed set of (threshold, cap). `cap` 0: no replica at all.
  UEC_HD void find_cheapest(const Objective& cost, int64_t* threshold, int32_t* cap) {
    *threshold = fullest;
    *cap = 0;
    int64_t least = cost.per_token * fullest;
    for (int32_t c = 1; c < 2 * last_cap; c = next_cap(c, topology.slots_per_rank)) {
      for (int32_t i = 0; i < 14; ++i) {
        const int64_t tokens = mean + (i == 13 ? 0 : (fullest - mean) >> i);
        int64_t sum = cost.per_token * tokens + cost.per_transfer * c;
        for (int32_t p = 0; p < num_pools && sum < least; ++p) {
          PoolSearch pool = search(p);
          const bool enough = pool.least_cap(tokens) <= c;
          const int32_t n = enough ? pool.fewest(tokens, c).num_replicas : -1;
          sum = n < 0 ? least : sum + cost.per_replica * n;
        }
        if (sum >= least) continue;
        least = sum;
        *threshold = tokens;
        *cap = c;
      }
    }
  }
};

}  // namespace detail

UEC_HD inline void plan_replicas(const Topology& topology, const int64_t* load,
                                 const Objective& objective, PlannerScratch scratch,
                                 int32_t* slot_expert, int32_t* slot_quota, int32_t* home_quota) {
  const int32_t slots = topology.slots_per_rank;
  for (int32_t i = 0; i < topology.num_ranks * slots; ++i) {
    slot_expert[i] = -1;
    slot_quota[i] = 0;
  }
  for (int32_t e = 0; e < topology.num_experts; ++e) home_quota[e] = static_cast<int32_t>(load[e]);
  if (slots == 0) return;

  detail::Planner planner{topology, load, scratch};
  const int64_t total = planner.begin();
  int64_t threshold = planner.mean;
  if (!objective.by_cost)
    threshold =
        max64(threshold, detail::target_threshold(total, topology.num_ranks, objective.target_ppm));
  if (planner.fullest <= threshold) return;
  planner.sort_mains(planner.mean);
  int32_t cap = 0;
  if (objective.by_cost) {
    planner.find_cheapest(objective, &threshold, &cap);
    if (cap == 0) return;
  }
  for (int32_t p = 0; p < planner.num_pools; ++p) {
    detail::PoolSearch pool = planner.search(p);
    const int32_t num_replicas = objective.by_cost ? pool.fewest(threshold, cap).num_replicas
                                                   : pool.plan(threshold, planner.mean);
    for (int32_t i = 0; i < num_replicas; ++i) {
      const Replica& replica = scratch.best[i];
      int32_t slot = replica.rank * slots;
      while (slot_expert[slot] >= 0) ++slot;
      slot_expert[slot] = replica.expert;
      slot_quota[slot] = replica.quota;
      home_quota[replica.expert] -= replica.quota;
    }
  }
}

}  // namespace uec
