// The planner's search: which probes to ask, and which of their plans to take.
//
// A crew (crew.hpp) asks several at a time; on the host it asks them one by one. The plan is the
// same: of what was asked for nothing, nothing is used.
#pragma once

#include <cstdint>

#include "core/common.hpp"
#include "core/crew.hpp"
#include "core/probe.hpp"
#include "core/scratch.hpp"

namespace uec {

// ---------------------------------------------------------------------------------------------
// Contract

inline constexpr int64_t kPpm = 1'000'000;
inline constexpr int64_t kMaxTargetPpm = 1000 * kPpm;

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

// A load, as the search sees it. Borrowed arrays.
//
// Ranks that may hold each other's experts are a pool: a domain, or all ranks where plans may cross
// domains. Pools are numbered by their fullest rank.
struct SortedLoad {
  int32_t num_pools = 0;
  int32_t largest = 0;                  // tokens of the largest expert
  int32_t last_cap = 0;                 // from which on a cap on exports and imports caps nothing
  const int32_t* pool_begin = nullptr;  // [num_pools + 1] where a pool begins in `ranks`
  const int32_t* ranks = nullptr;       // [G] by pool, then descending load, then id
  const int64_t* tokens_before = nullptr;  // [G + 1] tokens of `ranks`, running sums
  const int64_t* load = nullptr;           // [E]
  const int32_t* mains_begin = nullptr;    // [G + 1]
  const int32_t* mains = nullptr;          // [E] by home; of ranks above the mean by descending
                                           // load, then id

  UEC_HD Pool pool(int32_t p) const {
    const int32_t begin = pool_begin[p];
    return {
        ranks + begin, pool_begin[p + 1] - begin, tokens_before + begin, load, mains_begin, mains,
        largest};
  }
  UEC_HD int64_t pool_mean(int32_t p) const {
    const int32_t begin = pool_begin[p], end = pool_begin[p + 1];
    return ceil_div(tokens_before[end] - tokens_before[begin], end - begin);
  }
};

// How low the fullest rank of a pool is to be brought.
struct Goal {
  int64_t mean;       // tokens that some rank has under any plan: the largest mean of a pool
  int64_t fullest;    // tokens of the fullest rank without replicas
  int64_t threshold;  // by target: tokens of a rank that are few enough
  bool is_met;        // without replicas
};

// All members of a team have the same answer. `mains` and `last_cap` are not looked at.
template <class Team>
UEC_HD Goal find_goal(Team team, const SortedLoad& sorted, const Objective& objective);

// A team's working memory. Aligned to 8 bytes; nothing in it needs to be initialised.
struct TeamScratch {
  CoolRank* cool;  // [G]
  Replica* trial;  // [G * S]
  Replica* best;   // [G * S] the plan that this team's probe has found, if it is kept
  int32_t* have;   // [E]
  int64_t bytes;

  UEC_HD TeamScratch(const Topology& topology, std::byte* memory) {
    const int64_t num_slots = int64_t{topology.num_ranks} * topology.slots_per_rank;
    ScratchCutter cutter(memory);
    cool = cutter.take<CoolRank>(topology.num_ranks);
    trial = cutter.take<Replica>(num_slots);
    best = cutter.take<Replica>(num_slots);
    have = cutter.take<int32_t>(topology.num_experts);
    bytes = round_up(cutter.used_bytes(), 8);
  }
};

// Writes the replicas of the plan into slots that are empty (-1, and 0 tokens), and takes their
// tokens from home_quota [E], which is the load. All threads of the crew call it, for a goal that
// is not met; no thread knows when others have written.
//
// Steps: with n = log2(4096 G), c = S + log2(M / S) + 2 caps and at most M mains on a rank, a pool
// takes at most 9 (2 n + 2 + c) + 6 probes by target, and 9 (14 c + 1) by cost. By target it is
// nearly always ten; a crew of eight asks these in three rounds.
template <class Crew>
UEC_HD void search_plan(Crew& crew, const SortedLoad& sorted, const Objective& objective,
                        const Goal& goal, int32_t slots_per_rank, const TeamScratch& scratch,
                        int32_t* slot_expert, int32_t* slot_quota, int32_t* home_quota);

// ---------------------------------------------------------------------------------------------
// Implementation

namespace detail {

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

// The largest of the members' values, which are not negative.
template <class Team>
UEC_HD int64_t highest(Team team, int64_t value) {
  const auto high = static_cast<uint32_t>(value >> 32), low = static_cast<uint32_t>(value);
  const uint32_t most = ~team.lowest(~high);
  const uint32_t least_missing = team.lowest(high == most ? ~low : ~0u);
  return static_cast<int64_t>(most) << 32 | ~least_missing;
}

// The search in one pool.
template <class Crew>
struct PoolSearch {
  Crew& crew;
  Pool pool;
  TeamScratch& scratch;
  int32_t slots;
  int32_t last_cap;
  int32_t keeper = 0;  // the team that has the plan in its scratch.best

  struct Found {
    int32_t num_replicas, variant;  // -1: none
  };

  // This team's question; all teams' answers, as probe() gives them. A team with nothing to ask has
  // a variant from kNumVariants up.
  UEC_HD const int32_t* ask(int64_t threshold, int32_t cap, int32_t variant) {
    const Question question{threshold, cap < slots ? cap : slots, cap, variant};
    const ProbeScratch memory{scratch.have, scratch.cool};
    return crew.exchange(
        variant < kNumVariants ? probe(crew.team(), pool, question, memory, scratch.trial) : -1);
  }
  // What that team has just found is the plan, until another is.
  UEC_HD void keep(int32_t team) {
    keeper = team;
    if (crew.index() != team) return;
    Replica* const kept = scratch.trial;
    scratch.trial = scratch.best;
    scratch.best = kept;
  }

  UEC_HD bool reaches(int64_t threshold) {
    for (int32_t first = 0; first < kNumVariants; first += crew.size()) {
      const int32_t* const counts = ask(threshold, last_cap, first + crew.index());
      for (int32_t t = 0; t < crew.size(); ++t)
        if (counts[t] >= 0) return true;
    }
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
    const auto team = crew.team();
    int32_t cap = 1;
    for (int32_t i = team.index(); i < pool.num_ranks; i += team.size()) {
      int64_t excess = pool.rank_load(i) - threshold;
      if (excess <= 0) break;
      const int32_t* const mains = pool.mains + pool.mains_begin[pool.ranks[i]];
      int32_t n = 0;
      for (; excess > 0; ++n) excess -= pool.load[mains[n]];
      cap = max32(cap, n);
    }
    return static_cast<int32_t>(~team.lowest(~static_cast<uint32_t>(cap)));
  }

  // Keeps the better one of a plan and what the team `t` has found with `variant`.
  UEC_HD void prefer_fewer(Found* found, int32_t count, int32_t variant, int32_t t) {
    if (count < 0 || (found->variant >= 0 && count >= found->num_replicas)) return;
    *found = {count, variant};
    keep(t);
  }

  // The plan with the fewest replicas, kept: of the first style that finds any, since later ones
  // send more.
  UEC_HD Found fewest(int64_t threshold, int32_t cap) {
    Found found{-1, -1};
    for (int32_t first = 0; first < kNumVariants; first += crew.size()) {
      if (first % kNumOrders == 0 && found.variant >= 0) return found;
      const int32_t* const counts = ask(threshold, cap, first + crew.index());
      for (int32_t v = first; v < first + crew.size() && v < kNumVariants; ++v) {
        if (v % kNumOrders == 0 && found.variant >= 0) return found;
        prefer_fewer(&found, counts[v - first], v, v - first);
      }
    }
    return found;
  }

  // What nearly every load takes, in one round: that `wanted` is reached, and its fewest replicas
  // with the cap that it needs. Not found: it may take longer.
  UEC_HD Found first_round(int64_t wanted, int32_t cap) {
    const bool reaching = crew.index() >= kNumOrders;
    const int32_t* const counts =
        ask(wanted, reaching ? last_cap : cap, reaching ? crew.index() - kNumOrders : crew.index());
    bool reached = false;
    for (int32_t t = kNumOrders; t < crew.size(); ++t) reached |= counts[t] >= 0;
    Found found{-1, -1};
    for (int32_t v = 0; v < kNumOrders && reached; ++v) prefer_fewer(&found, counts[v], v, v);
    return found;
  }

  // With the same cap and no more replicas, less imbalance: six steps of bisection. The teams ask
  // about the next few steps at once, whatever the first of them will bring: team t about node t +
  // 1 of the tree of steps, where 2 n follows on a success of node n, and 2 n + 1 on a failure.
  UEC_HD void improve(int64_t low, int64_t high, int32_t cap, Found* found) {
    int32_t steps = 6;
    while (steps > 0 && high - low > 1) {
      int64_t below = low, above = high;
      const int32_t node = crew.index() + 1;
      int32_t depth = 0;
      while (node >> (depth + 1) != 0) ++depth;
      bool useful = true;
      for (int32_t d = depth; d > 0 && useful; --d) {
        const int64_t middle = below + (above - below) / 2;
        ((node >> (d - 1) & 1) == 0 ? above : below) = middle;
        useful = above - below > 1;
      }
      useful = useful && depth < steps;
      const int32_t* const counts =
          ask(below + (above - below) / 2, cap, useful ? found->variant : kNumVariants);
      for (int32_t n = 1; n <= crew.size() && steps > 0 && high - low > 1; --steps) {
        const int64_t middle = low + (high - low) / 2;
        const int32_t count = counts[n - 1];
        if (count >= 0 && count <= found->num_replicas) {
          high = middle;
          found->num_replicas = count;
          keep(n - 1);
          n = 2 * n;
        } else {
          low = middle;
          n = 2 * n + 1;
        }
      }
    }
  }

  // By target: keeps the plan and returns its number of replicas.
  UEC_HD int32_t plan(int64_t wanted, int64_t mean) {
    int64_t high = wanted;
    int32_t cap = least_cap(high);
    Found found{-1, -1};
    if (crew.size() > kNumOrders) found = first_round(high, cap);
    if (found.variant < 0) {
      high = lowest_threshold(wanted, mean);
      cap = least_cap(high);
    }
    for (; found.variant < 0 && cap < 2 * last_cap; cap = next_cap(cap, slots)) {
      found = fewest(high, cap);
      if (found.variant >= 0) break;
    }
    if (found.num_replicas <= 0) return 0;
    improve(mean - 1, high, cap, &found);
    return found.num_replicas;
  }

  // The kept plan into its slots.
  UEC_HD void place(int32_t num_replicas, int32_t* slot_expert, int32_t* slot_quota,
                    int32_t* home_quota) const {
    if (crew.index() != keeper) return;
    const auto team = crew.team();
    for (int32_t i = team.index(); i < num_replicas; i += team.size()) {
      const Replica replica = scratch.best[i];
      const int32_t at = replica.rank * slots + replica.slot;
      slot_expert[at] = replica.expert;
      slot_quota[at] = replica.quota;
      crew.subtract(home_quota + replica.expert, replica.quota);
    }
  }
};

// The search in all pools.
template <class Crew>
struct Search {
  Crew& crew;
  const SortedLoad& sorted;
  TeamScratch scratch;
  const Goal& goal;
  int32_t slots;

  UEC_HD PoolSearch<Crew> in(int32_t p) {
    return {crew, sorted.pool(p), scratch, slots, sorted.last_cap};
  }

  // The cheapest of a fixed set of (threshold, cap). `cap` 0: no replica at all.
  UEC_HD void find_cheapest(const Objective& cost, int64_t* threshold, int32_t* cap) {
    const int64_t mean = goal.mean, fullest = goal.fullest;
    *threshold = fullest;
    *cap = 0;
    int64_t least = cost.per_token * fullest;
    for (int32_t c = 1; c < 2 * sorted.last_cap; c = next_cap(c, slots)) {
      for (int32_t i = 0; i < 14; ++i) {
        const int64_t tokens = mean + (i == 13 ? 0 : (fullest - mean) >> i);
        int64_t sum = cost.per_token * tokens + cost.per_transfer * c;
        for (int32_t p = 0; p < sorted.num_pools && sum < least; ++p) {
          PoolSearch<Crew> pool = in(p);
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

template <class Team>
UEC_HD Goal find_goal(Team team, const SortedLoad& sorted, const Objective& objective) {
  int64_t mean = 0;
  for (int32_t p = team.index(); p < sorted.num_pools; p += team.size())
    mean = max64(mean, sorted.pool_mean(p));
  Goal goal{};
  goal.mean = goal.threshold = detail::highest(team, mean);
  goal.fullest = sorted.pool(0).fullest();
  if (!objective.by_cost) {
    const int32_t num_ranks = sorted.pool_begin[sorted.num_pools];
    const int64_t total = sorted.tokens_before[num_ranks];
    goal.threshold =
        max64(goal.mean, detail::target_threshold(total, num_ranks, objective.target_ppm));
  }
  goal.is_met = goal.fullest <= goal.threshold;
  return goal;
}

template <class Crew>
UEC_HD void search_plan(Crew& crew, const SortedLoad& sorted, const Objective& objective,
                        const Goal& goal, int32_t slots_per_rank, const TeamScratch& scratch,
                        int32_t* slot_expert, int32_t* slot_quota, int32_t* home_quota) {
  detail::Search<Crew> search{crew, sorted, scratch, goal, slots_per_rank};
  int64_t threshold = goal.threshold;
  int32_t cap = 0;
  if (objective.by_cost) {
    search.find_cheapest(objective, &threshold, &cap);
    if (cap == 0) return;
  }
  for (int32_t p = 0; p < sorted.num_pools; ++p) {
    detail::PoolSearch<Crew> pool = search.in(p);
    const int32_t num_replicas = objective.by_cost ? pool.fewest(threshold, cap).num_replicas
                                                   : pool.plan(threshold, goal.mean);
    pool.place(num_replicas, slot_expert, slot_quota, home_quota);
  }
}

}  // namespace uec
