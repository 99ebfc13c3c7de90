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

// The search in one pool: a question for every team, and what their answers lead to, round by
// round. (Turned inside out like this a kernel has one copy of the probe, which is most of its
// code.)
template <class Crew>
class PoolSearch {
 public:
  struct Found {
    int32_t num_replicas, variant;  // -1: none
  };

  UEC_HD PoolSearch(const Crew& crew, const Pool& pool, int32_t slots, int32_t last_cap)
      : crew_(crew), pool_(pool), slots_(slots), last_cap_(last_cap) {}

  // By target: the lowest threshold from `wanted` up that some probe reaches; with the lowest cap
  // for it, the fewest replicas; with as many, less imbalance.
  UEC_HD void begin_by_target(int64_t wanted, int64_t mean) {
    improves_ = true;
    wanted_ = wanted;
    mean_ = mean;
    if (crew_.size() > kNumOrders) {
      aim_ = Aim::kOpening;
      high_ = wanted;
      cap_ = least_cap(wanted);
    } else {
      begin_thresholds();
    }
  }
  // The fewest replicas for this threshold and cap.
  UEC_HD void begin_by_cost(int64_t threshold, int32_t cap) {
    improves_ = false;
    high_ = threshold;
    begin_cap(cap);
  }

  UEC_HD bool is_done() const { return aim_ == Aim::kDone; }

  // Of this team. One without a question gets a variant from kNumVariants up.
  UEC_HD Question question() const {
    const int32_t i = crew_.index();
    switch (aim_) {
      case Aim::kOpening:
        return i < kNumOrders ? make(high_, cap_, i) : make(high_, last_cap_, i - kNumOrders);
      case Aim::kImprovement:
        return improvement();
      default:
        return make(asked_, cap_, first_ + i);
    }
  }

  // The answers of all teams, as probe() gives them. Returns the team whose trial is the best plan
  // so far, or -1: the one that was is.
  UEC_HD int32_t take(const int32_t* counts) {
    switch (aim_) {
      case Aim::kOpening:
        return take_opening(counts);
      case Aim::kThreshold:
        take_threshold(counts);
        return -1;
      case Aim::kCap:
        return take_cap(counts);
      default:
        return take_improvement(counts);
    }
  }

  // -1 where there is no plan, or none has been looked for.
  UEC_HD Found found() const { return found_; }

  // The lowest cap below which some rank could not shed its excess.
  UEC_HD int32_t least_cap(int64_t threshold) const {
    const auto team = crew_.team();
    int32_t cap = 1;
    for (int32_t i = team.index(); i < pool_.num_ranks; i += team.size()) {
      int64_t excess = pool_.rank_load(i) - threshold;
      if (excess <= 0) break;
      const int32_t* const mains = pool_.mains + pool_.mains_begin[pool_.ranks[i]];
      int32_t n = 0;
      for (; excess > 0; ++n) excess -= pool_.load[mains[n]];
      cap = max32(cap, n);
    }
    return static_cast<int32_t>(~team.lowest(~static_cast<uint32_t>(cap)));
  }

 private:
  enum class Aim : int32_t { kOpening, kThreshold, kCap, kImprovement, kDone };
  enum class Stage : int32_t { kWanted, kMean, kGallop, kBisect };  // of kThreshold

  UEC_HD Question make(int64_t threshold, int32_t cap, int32_t variant) const {
    return {threshold, cap < slots_ ? cap : slots_, cap, variant};
  }
  UEC_HD void ask(int64_t threshold, int32_t cap) {
    asked_ = threshold;
    cap_ = cap;
    first_ = 0;
  }

  // ---- what nearly every load takes, in one round: that `wanted` is reached, and its fewest
  // replicas with the cap that it needs. Where that fails the search begins anew.

  UEC_HD int32_t take_opening(const int32_t* counts) {
    bool is_reached = false;
    for (int32_t t = kNumOrders; t < crew_.size(); ++t) is_reached |= counts[t] >= 0;
    int32_t best = -1;
    for (int32_t v = 0; v < kNumOrders && is_reached; ++v)
      if (prefer_fewer(counts[v], v)) best = v;
    if (best >= 0)
      begin_improvement();
    else
      begin_thresholds();
    return best;
  }

  // ---- the lowest threshold that some probe reaches, to one part in 4,096. Gallops away from the
  // low end, where the answer nearly always is, then bisects. (More room does not always help a
  // greedy: the nearest success is a better guide than the middle, and where `wanted` is out of
  // reach the mean may not be.)

  UEC_HD void begin_thresholds() {
    aim_ = Aim::kThreshold;
    stage_ = Stage::kWanted;
    unit_ = step_ = max64(wanted_ / 4096, 1);
    high_ = wanted_;
    ask(wanted_, last_cap_);
  }
  UEC_HD void take_threshold(const int32_t* counts) {
    bool is_reached = false;
    for (int32_t t = 0; t < crew_.size() && !is_reached; ++t) is_reached = counts[t] >= 0;
    first_ += crew_.size();
    if (!is_reached && first_ < kNumVariants) return;
    if (stage_ == Stage::kBisect) {
      (is_reached ? high_ : low_) = asked_;
      bisect();
    } else if (is_reached && stage_ == Stage::kGallop) {
      bisect();
    } else if (is_reached) {
      high_ = asked_;
      begin_cap(least_cap(high_));
    } else if (stage_ == Stage::kWanted && mean_ < wanted_) {
      stage_ = Stage::kMean;
      ask(mean_, last_cap_);
    } else {
      gallop();
    }
  }
  UEC_HD void gallop() {
    stage_ = Stage::kGallop;
    low_ = high_;  // no plan
    high_ = min64(low_ + step_, pool_.fullest());
    step_ *= 2;
    if (high_ == pool_.fullest())  // which needs no replica
      bisect();
    else
      ask(high_, last_cap_);
  }
  UEC_HD void bisect() {
    stage_ = Stage::kBisect;
    if (high_ - low_ > unit_)
      ask(low_ + (high_ - low_) / 2, last_cap_);
    else
      begin_cap(least_cap(high_));
  }

  // ---- the fewest replicas: of the first style that finds any, since later ones send more
  // --------

  UEC_HD void begin_cap(int32_t cap) {
    aim_ = Aim::kCap;
    found_ = {-1, -1};
    ask(high_, cap);
  }
  UEC_HD int32_t take_cap(const int32_t* counts) {
    int32_t best = -1;
    int32_t v = first_;
    for (; v < first_ + crew_.size() && v < kNumVariants; ++v) {
      if (v % kNumOrders == 0 && found_.variant >= 0) break;
      if (prefer_fewer(counts[v - first_], v)) best = v - first_;
    }
    first_ = v;
    if (found_.variant >= 0 && v % kNumOrders == 0) {
      begin_improvement();
    } else if (v == kNumVariants) {
      const int32_t next = next_cap(cap_, slots_);
      if (improves_ && next < 2 * last_cap_)
        begin_cap(next);
      else
        aim_ = Aim::kDone;
    }
    return best;
  }
  // Whether the plan that a variant has found is the best so far.
  UEC_HD bool prefer_fewer(int32_t count, int32_t variant) {
    if (count < 0 || (found_.variant >= 0 && count >= found_.num_replicas)) return false;
    found_ = {count, variant};
    return true;
  }

  // ---- with the same cap and no more replicas, less imbalance: six steps of bisection. The teams
  // ask about the next few at once, whatever the first of them will bring: team t about node t + 1
  // of the tree of steps, where 2 n follows on a success of node n, and 2 n + 1 on a failure.

  UEC_HD void begin_improvement() {
    aim_ = Aim::kImprovement;
    low_ = mean_ - 1;
    steps_ = improves_ && found_.num_replicas > 0 ? 6 : 0;
    if (steps_ == 0 || high_ - low_ <= 1) aim_ = Aim::kDone;
  }
  UEC_HD Question improvement() const {
    const int32_t node = crew_.index() + 1;
    int32_t depth = 0;
    while (node >> (depth + 1) != 0) ++depth;
    int64_t low = low_, high = high_;
    bool is_asked = depth < steps_;
    for (int32_t d = depth; d > 0 && is_asked; --d) {
      ((node >> (d - 1) & 1) == 0 ? high : low) = low + (high - low) / 2;
      is_asked = high - low > 1;
    }
    return make(low + (high - low) / 2, cap_, is_asked ? found_.variant : kNumVariants);
  }
  UEC_HD int32_t take_improvement(const int32_t* counts) {
    int32_t best = -1;
    for (int32_t n = 1; n <= crew_.size() && aim_ != Aim::kDone;) {
      const int64_t middle = low_ + (high_ - low_) / 2;
      const int32_t count = counts[n - 1];
      const bool succeeds = count >= 0 && count <= found_.num_replicas;
      (succeeds ? high_ : low_) = middle;
      if (succeeds) {
        found_.num_replicas = count;
        best = n - 1;
      }
      n = succeeds ? 2 * n : 2 * n + 1;
      if (--steps_ == 0 || high_ - low_ <= 1) aim_ = Aim::kDone;
    }
    return best;
  }

  const Crew& crew_;
  const Pool& pool_;
  const int32_t slots_, last_cap_;
  Aim aim_ = Aim::kDone;
  Stage stage_ = Stage::kWanted;
  bool improves_ = false;
  int32_t cap_ = 0, first_ = 0, steps_ = 0;  // first_: variant of this round
  int64_t wanted_ = 0, mean_ = 0, unit_ = 0, step_ = 0, low_ = 0, high_ = 0, asked_ = 0;
  Found found_{-1, -1};
};

// The plan, kept by the team whose probe has found it.
template <class Crew>
struct Keeper {
  Crew& crew;
  TeamScratch scratch;
  int32_t slots;
  int32_t team = 0;

  UEC_HD void keep(int32_t finder) {
    team = finder;
    if (crew.index() != finder) return;
    Replica* const kept = scratch.trial;
    scratch.trial = scratch.best;
    scratch.best = kept;
  }
  UEC_HD void place(int32_t num_replicas, int32_t* slot_expert, int32_t* slot_quota,
                    int32_t* home_quota) const {
    if (crew.index() != team) return;
    const auto members = crew.team();
    for (int32_t i = members.index(); i < num_replicas; i += members.size()) {
      const Replica replica = scratch.best[i];
      const int32_t at = replica.rank * slots + replica.slot;
      slot_expert[at] = replica.expert;
      slot_quota[at] = replica.quota;
      crew.subtract(home_quota + replica.expert, replica.quota);
    }
  }
};

// By cost: a fixed set of (threshold, cap), one after the other, and the cheapest of them.
struct CostSearch {
  const Objective& cost;
  const Goal& goal;
  int32_t slots, last_cap;
  int32_t cap = 1, i = 0;
  int64_t least, best_threshold = 0;
  int32_t best_cap = 0;  // 0: no replica at all

  UEC_HD CostSearch(const Objective& objective, const Goal& aim, int32_t num_slots, int32_t last)
      : cost(objective),
        goal(aim),
        slots(num_slots),
        last_cap(last),
        least(objective.per_token * aim.fullest) {}

  UEC_HD int64_t threshold() const {
    return goal.mean + (i == 13 ? 0 : (goal.fullest - goal.mean) >> i);
  }
  // Without replicas.
  UEC_HD int64_t fixed() const { return cost.per_token * threshold() + cost.per_transfer * cap; }
  // `sum`: the cost of the present one. Returns whether there is another.
  UEC_HD bool next(int64_t sum) {
    if (sum < least) {
      least = sum;
      best_threshold = threshold();
      best_cap = cap;
    }
    if (++i < 14) return true;
    i = 0;
    cap = next_cap(cap, slots);
    return cap < 2 * last_cap;
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
  detail::Keeper<Crew> keeper{crew, scratch, slots_per_rank};
  detail::CostSearch costs(objective, goal, slots_per_rank, sorted.last_cap);
  for (bool is_last = !objective.by_cost;;) {
    int64_t sum = costs.fixed();
    for (int32_t p = 0; p < sorted.num_pools && (is_last || sum < costs.least); ++p) {
      const Pool pool = sorted.pool(p);
      detail::PoolSearch<Crew> search(crew, pool, slots_per_rank, sorted.last_cap);
      if (!objective.by_cost)
        search.begin_by_target(goal.threshold, goal.mean);
      else if (is_last)
        search.begin_by_cost(costs.best_threshold, costs.best_cap);
      else if (search.least_cap(costs.threshold()) <= costs.cap)
        search.begin_by_cost(costs.threshold(), costs.cap);
      while (!search.is_done()) {
        const Question question = search.question();
        const ProbeScratch memory{keeper.scratch.have, keeper.scratch.cool};
        const int32_t count = question.variant < kNumVariants
                                  ? probe(crew.team(), pool, question, memory, keeper.scratch.trial)
                                  : -1;
        const int32_t best = search.take(crew.exchange(count));
        if (best >= 0) keeper.keep(best);
      }
      const int32_t num_replicas = search.found().num_replicas;
      if (is_last)
        keeper.place(num_replicas, slot_expert, slot_quota, home_quota);
      else
        sum = num_replicas < 0 ? costs.least : sum + objective.per_replica * num_replicas;
    }
    if (is_last) return;
    if (costs.next(sum)) continue;
    is_last = true;
    if (costs.best_cap == 0) return;
  }
}

}  // namespace uec
