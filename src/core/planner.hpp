// The planner: from the exact load of a microbatch to replicas and quotas.
//
// The readable definition of the same algorithm is `ultraep_comm/planner.py`; the two agree in
// every integer, and the tests hold them to it. Integers only, every tie broken by id: the result
// is the same on every rank, host and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/common.hpp"
#include "core/mains.hpp"
#include "core/scratch.hpp"

namespace uec {

// ---------------------------------------------------------------------------------------------
// Contract

inline constexpr int64_t kPpm = 1'000'000;
inline constexpr int64_t kMaxTargetPpm = 1000 * kPpm;

// One replica: `quota` tokens of `expert` are served by `rank`. The quota is never zero.
struct Replica {
  int32_t expert;
  int32_t rank;
  int32_t quota;
};

// A rank below the threshold, as the probe sees it.
struct CoolRank {
  int64_t slack;  // tokens it may still take; 0 once its slots are used up
  int32_t rank;
  int32_t pool;
  int32_t replicas;  // slots in use
};

// Working memory of plan_replicas(). `memory` is aligned to 8 bytes and has planner_scratch_bytes()
// bytes; nothing in it needs to be initialised, and nothing in it outlives the call.
struct PlannerScratch {
  int64_t* rank_load;    // [G] tokens on a rank without replicas
  int64_t* pool_load;    // [G] tokens of a pool (see number_pools)
  CoolRank* cool;        // [G]
  int32_t* pool;         // [G] pool of a rank
  int32_t* pool_first;   // [G] smallest rank of a pool
  int32_t* pool_size;    // [G]
  int32_t* hot;          // [G] ranks that may have to export, by descending load
  int32_t* mains_begin;  // [G + 1]
  int32_t* mains;        // [E] mains by home, each rank's by descending load
  Replica* trial;        // [G * S]
  Replica* best;         // [G * S]
  int64_t bytes;

  UEC_HD PlannerScratch(const Topology& topology, std::byte* memory) {
    const int64_t g = topology.num_ranks;
    const int64_t num_slots = g * topology.slots_per_rank;
    ScratchCutter cutter(memory);
    rank_load = cutter.take<int64_t>(g);
    pool_load = cutter.take<int64_t>(g);
    cool = cutter.take<CoolRank>(g);
    pool = cutter.take<int32_t>(g);
    pool_first = cutter.take<int32_t>(g);
    pool_size = cutter.take<int32_t>(g);
    hot = cutter.take<int32_t>(g);
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
//   load        [E] tokens of each expert over all source ranks, 0 <= load <= kMaxLoad
//   target_ppm  imbalance (largest rank quota over the mean) that is good enough, in millionths;
//               kPpm <= target_ppm <= kMaxTargetPpm
//   slot_expert [G, S] out: expert in the slot or -1; a rank's slots are filled from 0
//   slot_quota  [G, S] out: tokens of that replica; 0 where the slot is empty, never 0 elsewhere
//   home_quota  [E] out: tokens that stay on the main instance
//
// What holds of the result: the quotas of an expert's instances sum to its load; no rank has two
// instances of an expert; replicas are where Topology::may_hold allows; no rank both exports and
// imports; the largest rank quota is at most that of no replication.
UEC_HD inline void plan_replicas(const Topology& topology, const int64_t* load, int64_t target_ppm,
                                 PlannerScratch scratch, int32_t* slot_expert, int32_t* slot_quota,
                                 int32_t* home_quota);

// ---------------------------------------------------------------------------------------------
// Implementation

namespace planner_detail {

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

// Numbers the pools: ranks that may hold each other's experts, which is a domain, or all ranks
// where plans may cross domains. Returns how many there are. O(G * pools).
UEC_HD inline int32_t number_pools(const Topology& topology, const PlannerScratch& s) {
  int32_t num_pools = 0;
  for (int32_t r = 0; r < topology.num_ranks; ++r) {
    int32_t p = 0;
    while (p < num_pools && !topology.allow_cross_domain &&
           topology.domain[s.pool_first[p]] != topology.domain[r]) {
      ++p;
    }
    if (p == num_pools) {
      ++num_pools;
      s.pool_first[p] = r;
      s.pool_size[p] = 0;
      s.pool_load[p] = 0;
    }
    s.pool[r] = p;
    ++s.pool_size[p];
    s.pool_load[p] += s.rank_load[r];
  }
  return num_pools;
}

// ceil(total / num_ranks * target), exactly. The quotient is split off first because total * ppm
// may pass 2^63; the remainder is below num_ranks * 10^6, and times at most 10^9 it stays below
// 2^63 for up to 9,000 ranks.
UEC_HD inline int64_t target_threshold(int64_t total, int32_t num_ranks, int64_t target_ppm) {
  const int64_t unit = num_ranks * kPpm;
  return total / unit * target_ppm + ceil_div(total % unit * target_ppm, unit);
}

// The cool rank of `pool` that takes `need` tokens: where some can take all of it, the one with
// the fewest replicas, then the least slack, which keeps the large gaps for the large needs; else
// the one with the most slack, then the fewest replicas. Ties go to the lower rank. -1: none.
//
// That the rank already has the expert cannot happen: a replica leaves either no need or no slack.
UEC_HD inline int32_t choose_rank(const CoolRank* cool, int32_t num_cool, int32_t pool,
                                  int64_t need) {
  int32_t best = -1;
  for (int32_t i = 0; i < num_cool; ++i) {
    const CoolRank& c = cool[i];
    if (c.slack == 0 || c.pool != pool) continue;
    if (best >= 0) {
      const CoolRank& b = cool[best];
      const bool fits = c.slack >= need;
      const bool better =
          fits != (b.slack >= need) ? fits
          : fits ? c.replicas < b.replicas || (c.replicas == b.replicas && c.slack < b.slack)
                 : c.slack > b.slack || (c.slack == b.slack && c.replicas < b.replicas);
      if (!better) continue;
    }
    best = i;
  }
  return best;
}

// Tries to bring every rank down to `threshold`. Hot ranks are visited by descending load, their
// experts likewise, so that each exports as few experts as it can. Returns the number of replicas
// in `s.trial`, or -1 where the greedy finds no room.
UEC_HD inline int32_t probe(const Topology& topology, const int64_t* load, int64_t threshold,
                            int32_t num_hot, const PlannerScratch& s) {
  int32_t num_cool = 0;
  for (int32_t r = 0; r < topology.num_ranks; ++r) {
    const int64_t slack = threshold - s.rank_load[r];
    if (slack > 0) s.cool[num_cool++] = {slack, r, s.pool[r], 0};
  }
  int32_t count = 0;
  for (int32_t h = 0; h < num_hot && s.rank_load[s.hot[h]] > threshold; ++h) {
    const int32_t rank = s.hot[h];
    int64_t excess = s.rank_load[rank] - threshold;
    // The mains' loads add up to more than the excess, so the loop ends within this rank's mains
    // and before it meets one without load.
    for (int32_t m = s.mains_begin[rank]; excess > 0; ++m) {
      const int32_t expert = s.mains[m];
      int64_t need = min64(load[expert], excess);
      excess -= need;
      while (need > 0) {
        const int32_t chosen = choose_rank(s.cool, num_cool, s.pool[rank], need);
        if (chosen < 0) return -1;
        CoolRank& c = s.cool[chosen];
        const int64_t quota = min64(need, c.slack);
        s.trial[count++] = {expert, c.rank, static_cast<int32_t>(quota)};
        need -= quota;
        c.slack -= quota;
        if (++c.replicas == topology.slots_per_rank) c.slack = 0;
      }
    }
  }
  return count;
}

}  // namespace planner_detail

UEC_HD inline void plan_replicas(const Topology& topology, const int64_t* load, int64_t target_ppm,
                                 PlannerScratch scratch, int32_t* slot_expert, int32_t* slot_quota,
                                 int32_t* home_quota) {
  using namespace planner_detail;
  PlannerScratch& s = scratch;
  const int32_t num_ranks = topology.num_ranks;
  const int32_t slots = topology.slots_per_rank;

  for (int32_t i = 0; i < num_ranks * slots; ++i) {
    slot_expert[i] = -1;
    slot_quota[i] = 0;
  }
  for (int32_t r = 0; r < num_ranks; ++r) s.rank_load[r] = 0;
  for (int32_t e = 0; e < topology.num_experts; ++e) {
    home_quota[e] = static_cast<int32_t>(load[e]);
    s.rank_load[topology.home[e]] += load[e];
  }
  if (slots == 0) return;

  // No plan can go below the mean of a pool, and none needs to go below the target.
  int64_t total = 0;
  const int32_t num_pools = number_pools(topology, s);
  for (int32_t p = 0; p < num_pools; ++p) total += s.pool_load[p];
  int64_t low = target_threshold(total, num_ranks, target_ppm);
  for (int32_t p = 0; p < num_pools; ++p) {
    low = max64(low, ceil_div(s.pool_load[p], s.pool_size[p]));
  }
  // `high` always has a plan: no replication to begin with, later the best one found.
  int64_t high = 0;
  int32_t num_hot = 0;
  for (int32_t r = 0; r < num_ranks; ++r) {
    high = max64(high, s.rank_load[r]);
    if (s.rank_load[r] > low) s.hot[num_hot++] = r;
  }
  if (high <= low) return;

  sort_descending(s.hot, num_hot, s.rank_load);
  group_mains(topology, s.mains_begin, s.mains);
  for (int32_t h = 0; h < num_hot; ++h) {
    const int32_t begin = s.mains_begin[s.hot[h]];
    sort_descending(s.mains + begin, s.mains_begin[s.hot[h] + 1] - begin, load);
  }

  // Binary search that looks at the low end first, where the answer nearly always is.
  int32_t num_replicas = 0;
  for (int64_t threshold = low; low < high; threshold = low + (high - low) / 2) {
    const int32_t count = probe(topology, load, threshold, num_hot, s);
    if (count < 0) {
      low = threshold + 1;
    } else {
      high = threshold;
      num_replicas = count;
      Replica* const kept = s.trial;
      s.trial = s.best;
      s.best = kept;
    }
  }

  for (int32_t i = 0; i < num_replicas; ++i) {
    const Replica& replica = s.best[i];
    int32_t slot = replica.rank * slots;
    while (slot_expert[slot] >= 0) ++slot;
    slot_expert[slot] = replica.expert;
    slot_quota[slot] = replica.quota;
    home_quota[replica.expert] -= replica.quota;
  }
}

}  // namespace uec
