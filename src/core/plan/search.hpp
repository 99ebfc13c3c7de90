// The planner's search: from a sorted load to replicas in their slots.
//
// A TeamSet (team.hpp) runs several probes at a time; on the host they run one by one. The plan is
// the same.
#pragma once

#include <cstdint>

#include "core/base/common.hpp"
#include "core/base/scratch.hpp"
#include "core/base/team.hpp"
#include "core/plan/packed_probe.hpp"
#include "core/plan/pool_search.hpp"
#include "core/plan/probe.hpp"
#include "core/plan/sorted_load.hpp"

namespace uec {

// ---------------------------------------------------------------------------------------------
// Contract

inline constexpr int64_t kPpm = 1'000'000;
inline constexpr int64_t kMaxTargetPpm = 1000 * kPpm;

// What to look for.
//
// By target: first the least imbalance (largest rank quota over the mean), down to the target; then
// the least transfer, max(experts that a rank exports, replicas that it imports); then the fewest
// replicas; then whatever further reduction of the imbalance is free.
//
// By cost: the least per_token * (tokens of the fullest rank) + per_transfer * transfer +
// per_replica * replicas.
struct Objective {
  int64_t target_ppm = 1'010'000;  // in millionths, kPpm to kMaxTargetPpm
  bool by_cost = false;            // then the target counts for nothing, and these do
  int64_t per_token = 0;           // below 2^22
  int64_t per_transfer = 0;        // below 2^40
  int64_t per_replica = 0;         // below 2^40

  // Exact to the token: in a single pool every rank has the mean, rounded down or up, wherever a
  // probe finds a way; see first_padded() of planner.hpp. Elsewhere the fullest rank may have some
  // tokens more than with a target just above 1, because the search continues with padded ranks.
  UEC_HD bool is_exact() const { return !by_cost && target_ppm == kPpm; }

  bool operator==(const Objective&) const = default;
};

// All members of a team get the same answer. `local_experts` and `last_cap` are not read.
template <class Team>
UEC_HD Goal find_goal(Team team, const SortedLoad& sorted, const Objective& objective);

// A team's working memory. Aligned to 8 bytes; nothing in it needs to be initialised.
struct TeamScratch {
  CoolRank* cool;        // [G]
  Replica* trial;        // [G * S]
  Replica* best;         // [G * S] the plan that this team's probe has found, if it is kept
  int32_t* tokens_left;  // [E]
  int64_t bytes;

  UEC_HD TeamScratch(const Topology& topology, std::byte* memory) {
    const int64_t num_slots = int64_t{topology.num_ranks} * topology.slots_per_rank;
    ScratchCutter cutter(memory);
    cool = cutter.take<CoolRank>(topology.num_ranks);
    trial = cutter.take<Replica>(num_slots);
    best = cutter.take<Replica>(num_slots);
    tokens_left = cutter.take<int32_t>(topology.num_experts);
    bytes = round_up(cutter.used_bytes(), 8);
  }
};

// Where a plan is written, as in plan_replicas() of planner.hpp.
struct PlanOut {
  int32_t* slot_expert;  // [G, S]
  int32_t* slot_quota;   // [G, S]
  int32_t* home_quota;   // [E]
};

// Writes the replicas of the plan into slots that are empty (-1, and 0 tokens), and takes their
// tokens from home_quota [E], which starts as the load. All threads of the set call it, for a goal
// that is not met yet; it does not order one thread's writes before another thread's reads.
//
// Steps: with n = log2(4096 G), c = S + log2(M / S) + 2 caps and at most M local experts on a rank,
// a pool takes at most 10 (2 n + 2 + 2 c) + 9 probes by target, and 10 (14 c + 1) by cost. By
// target it nearly always takes nine, which seven or more teams ask in three rounds.
template <class TeamSet>
UEC_HD void search_plan(TeamSet& teams, const SortedLoad& sorted, const Objective& objective,
                        const Goal& goal, int32_t slots_per_rank, const TeamScratch& scratch,
                        const PlanOut& out);

// ---------------------------------------------------------------------------------------------
// Implementation

namespace detail {

// floor(total / num_ranks * target), exactly. The quotient is split off first because total * ppm
// may pass 2^63; the remainder is below num_ranks * 10^6, and times at most 10^9 it stays below
// 2^63 for up to 9,000 ranks.
UEC_HD inline int64_t target_threshold(int64_t total, int32_t num_ranks, int64_t target_ppm) {
  const int64_t unit = num_ranks * kPpm;
  if (total < int64_t{1} << 33) return total * target_ppm / unit;  // one division
  return total / unit * target_ppm + total % unit * target_ppm / unit;
}

// The largest of the members' values, none of which is negative.
template <class Team>
UEC_HD int64_t highest(Team team, int64_t value) {
  const auto high = static_cast<uint32_t>(value >> 32), low = static_cast<uint32_t>(value);
  const uint32_t max_high = ~team.min_sync(~high);
  const uint32_t min_missing = team.min_sync(high == max_high ? ~low : ~0u);
  return static_cast<int64_t>(max_high) << 32 | ~min_missing;
}

// The plan, kept by the team whose probe has found it.
template <class TeamSet>
struct Keeper {
  TeamSet& teams;
  TeamScratch scratch;
  int32_t slots;
  int32_t team = 0;

  UEC_HD void keep(int32_t finder) {
    team = finder;
    if (teams.index() != finder) return;
    Replica* const kept = scratch.trial;
    scratch.trial = scratch.best;
    scratch.best = kept;
  }
  UEC_HD void place(const Pool& pool, int32_t num_replicas, const PlanOut& out) const {
    if (teams.index() != team) return;
    const auto members = teams.team();
    for (int32_t i = members.index(); i < num_replicas; i += members.size()) {
      const Replica replica = scratch.best[i];
      const int32_t expert = pool.local_experts[replica.local_pos];
      const int32_t at = pool.ranks[replica.place] * slots + replica.slot;
      out.slot_expert[at] = expert;
      out.slot_quota[at] = replica.quota;
      teams.subtract(out.home_quota + expert, replica.quota);
    }
  }
};

// By cost: a fixed set of (threshold, cap), tried in turn; the cheapest wins.
struct CostSearch {
  const Objective& cost;
  const Goal& goal;
  const SortedLoad& sorted;
  int32_t slots;
  int32_t cap = 1, i = 0;
  int64_t min_cost;
  int32_t best_i = 0, best_cap = 0;  // 0: no replica at all

  UEC_HD CostSearch(const Objective& objective, const Goal& aim, const SortedLoad& load,
                    int32_t num_slots)
      : cost(objective),
        goal(aim),
        sorted(load),
        slots(num_slots),
        min_cost(objective.per_token * aim.fullest) {}

  UEC_HD int64_t threshold(int32_t at) const {
    return goal.mean + (at == 13 ? 0 : (goal.fullest - goal.mean) >> at);
  }
  UEC_HD int64_t threshold() const { return threshold(i); }
  // The cost without replicas.
  UEC_HD int64_t fixed() const { return cost.per_token * threshold() + cost.per_transfer * cap; }
  // `sum`: the cost of the current one. Returns whether there is another.
  UEC_HD bool next(int64_t sum) {
    if (sum < min_cost) {
      min_cost = sum;
      best_i = i;
      best_cap = cap;
    }
    if (++i < 14) return true;
    i = 0;
    cap = next_cap(cap, slots);
    return cap < 2 * sorted.last_cap;
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
  goal.is_exact = objective.is_exact();
  return goal;
}

template <class TeamSet>
UEC_HD void search_plan(TeamSet& teams, const SortedLoad& sorted, const Objective& objective,
                        const Goal& goal, int32_t slots_per_rank, const TeamScratch& scratch,
                        const PlanOut& out) {
  detail::Keeper<TeamSet> keeper{teams, scratch, slots_per_rank};
  detail::CostSearch costs(objective, goal, sorted, slots_per_rank);
  for (bool is_last = !objective.by_cost;;) {
    int64_t sum = costs.fixed();
    for (int32_t p = 0; p < sorted.num_pools && (is_last || sum < costs.min_cost); ++p) {
      detail::PoolSearch<TeamSet> search(teams, sorted, goal, p, slots_per_rank);
      if (!objective.by_cost)
        search.begin_by_target();
      else if (is_last)
        search.begin_by_cost(costs.threshold(costs.best_i), costs.best_cap);
      else if (search.min_cap(costs.threshold()) <= costs.cap)
        search.begin_by_cost(costs.threshold(), costs.cap);
      while (!search.is_done()) {
        const Question question = search.question();
        const ProbeScratch memory{keeper.scratch.tokens_left, keeper.scratch.cool};
        const int32_t count =
            question.variant < kNumVariants
                ? fastest_probe(teams.team(), sorted, p, question, memory, keeper.scratch.trial)
                : -1;
        const int32_t best = search.take(teams.exchange(count));
        if (best >= 0) keeper.keep(best);
      }
      const int32_t num_replicas = search.found().num_replicas;
      if (is_last)
        keeper.place(search.pool(), num_replicas, out);
      else
        sum = num_replicas < 0 ? costs.min_cost : sum + objective.per_replica * num_replicas;
    }
    if (is_last) return;
    if (costs.next(sum)) continue;
    is_last = true;
    if (costs.best_cap == 0) return;
  }
}

}  // namespace uec
