// The planner's search in one pool: which probes to ask, and which of their plans is the best.
//
// It gives every team of a TeamSet (team.hpp) a question, and derives the next questions from the
// answers. (Inverted like this, a kernel has one copy of the probe, which is most of its code.) Any
// number of teams leads to the same plan: answers to speculative questions that turn out not to be
// needed are never used.
#pragma once

#include <cstdint>

#include "core/base/common.hpp"
#include "core/base/team.hpp"
#include "core/plan/probe.hpp"
#include "core/plan/sorted_load.hpp"

namespace uec::detail {

// Caps are tried one by one up to the number of slots, then doubled.
UEC_HD constexpr int32_t next_cap(int32_t cap, int32_t slots) {
  return cap < slots ? cap + 1 : 2 * cap;
}

template <class TeamSet>
class PoolSearch {
 public:
  struct Found {
    int32_t num_replicas, variant;  // -1: none
  };

  UEC_HD PoolSearch(const TeamSet& teams, const SortedLoad& sorted, const Goal& goal, int32_t p,
                    int32_t slots)
      : teams_(teams),
        sorted_(sorted),
        goal_(goal),
        p_(p),
        slots_(slots),
        last_cap_(sorted.last_cap) {
    clear_found();
  }

  UEC_HD Pool pool() const { return sorted_.pool(p_); }

  // By target: the lowest threshold, from the goal's up, that some probe reaches; at the lowest cap
  // that reaches it, the fewest replicas; at that number of replicas, less imbalance. Exact
  // plans nearly always exist with one import a rank, and as little transfer: with a cap, that is
  // tried first.
  UEC_HD void begin_by_target() {
    improves_ = true;
    aim_ = Aim::kOpening;
    high_ = goal_threshold();
    if (goal_.is_exact) stage_ = Stage::kOneImport;
    cap_ = min_cap(high_);
  }
  // The fewest replicas for this threshold and cap.
  UEC_HD void begin_by_cost(int64_t threshold, int32_t cap) {
    improves_ = false;
    high_ = threshold;
    begin_cap(cap);
  }

  UEC_HD bool is_done() const { return aim_ == Aim::kDone; }

  // This team's question. A team without one gets a variant from kNumVariants up.
  UEC_HD Question question() const {
    const int32_t i = teams_.index();
    switch (aim_) {
      case Aim::kOpening:
        return make(high_, cap_, first_ + i < kNumOrders ? first_ + i : kNumVariants,
                    found_.variant < 0 ? kAnyNumber : found_.num_replicas - 1);
      case Aim::kImprovement:
        return at_node(i + 1);
      default:
        return make(asked_, cap_, first_ + i,
                    found_.variant < 0 ? kAnyNumber : found_.num_replicas - 1);
    }
  }

  // Takes the answers of all teams, as probe() gives them. Returns the team whose trial is the best
  // plan so far, or -1 if the previous best still is.
  UEC_HD int32_t take(const int32_t* counts) {
    switch (aim_) {
      case Aim::kThreshold:
        take_threshold(counts);
        return -1;
      case Aim::kOpening:
      case Aim::kCap:
        return take_cap(counts);
      default:
        return take_improvement(counts);
    }
  }

  // -1 if there is no plan, or none has been searched for.
  UEC_HD Found found() const { return found_; }

  // The lowest cap below which some rank could not shed its excess.
  UEC_HD int32_t min_cap(int64_t threshold) const {
    const auto team = teams_.team();
    const Pool pool = this->pool();
    int32_t cap = 1;
    for (int32_t i = team.index(); i < pool.num_ranks; i += team.size()) {
      int64_t excess = pool.rank_load(i) - threshold;
      if (excess <= 0) break;
      const int32_t* const local_experts = pool.local_experts + pool.local_begin[pool.ranks[i]];
      int32_t n = 0;
      for (; excess > 0; ++n) excess -= pool.load[local_experts[n]];
      cap = max32(cap, n);
    }
    return static_cast<int32_t>(~team.min_sync(~static_cast<uint32_t>(cap)));
  }

 private:
  enum class Aim : int32_t { kOpening, kThreshold, kCap, kImprovement, kDone };
  // Stages of kThreshold; kOneImport is of the other phases, for exact plans.
  enum class Stage : int32_t { kGoal, kMean, kGallop, kBisect, kOneImport };

  static constexpr int32_t kAnyNumber = 0x7FFFFFFF;

  UEC_HD int64_t goal_threshold() const { return goal_.threshold; }
  UEC_HD Question make(int64_t threshold, int32_t cap, int32_t variant,
                       int32_t max_replicas) const {
    const int32_t imports = min32(cap, stage_ == Stage::kOneImport ? 1 : slots_);
    return {threshold, imports, cap, variant, max_replicas};
  }
  // Field by field: a device would load a constant struct from memory.
  UEC_HD void clear_found() {
    found_.num_replicas = -1;
    found_.variant = -1;
  }
  UEC_HD void ask(int64_t threshold, int32_t cap) {
    asked_ = threshold;
    cap_ = cap;
    first_ = 0;
  }

  // ---- the lowest threshold that some probe reaches, to one part in 4,096. Gallops away from the
  // low end, where the answer nearly always is, then bisects. (More room does not always help a
  // greedy algorithm: the nearest success is a better guide than the middle, and the mean may be
  // within reach even where goal_threshold() is not.)

  UEC_HD int64_t unit() const { return max64(goal_threshold() / 4096, 1); }
  UEC_HD void begin_thresholds() {
    aim_ = Aim::kThreshold;
    stage_ = Stage::kGoal;
    step_ = unit();
    high_ = goal_threshold();
    ask(goal_threshold(), last_cap_);
  }
  UEC_HD void take_threshold(const int32_t* counts) {
    bool is_reached = false;
    for (int32_t t = 0; t < teams_.size() && !is_reached; ++t) is_reached = counts[t] >= 0;
    first_ += teams_.size();
    if (!is_reached && first_ < kNumVariants) return;
    if (stage_ == Stage::kBisect) {
      (is_reached ? high_ : low_) = asked_;
      bisect();
    } else if (is_reached && stage_ == Stage::kGallop) {
      bisect();
    } else if (is_reached) {
      high_ = asked_;
      begin_cap(min_cap(high_));
    } else if (stage_ == Stage::kGoal && goal_.mean < goal_threshold()) {
      stage_ = Stage::kMean;
      ask(goal_.mean, last_cap_);
    } else {
      gallop();
    }
  }
  UEC_HD void gallop() {
    stage_ = Stage::kGallop;
    low_ = high_;  // no plan
    const int64_t fullest = pool().fullest();
    high_ = min64(low_ + step_, fullest);
    step_ *= 2;
    if (high_ == fullest)  // which needs no replica
      bisect();
    else
      ask(high_, last_cap_);
  }
  UEC_HD void bisect() {
    stage_ = Stage::kBisect;
    if (high_ - low_ > unit())
      ask(low_ + (high_ - low_) / 2, last_cap_);
    else
      begin_cap(min_cap(high_));
  }

  // ---- the fewest replicas: of the first style that finds any, since later ones send more

  UEC_HD void begin_cap(int32_t cap) {
    aim_ = Aim::kCap;
    clear_found();
    if (goal_.is_exact) stage_ = Stage::kOneImport;
    ask(high_, cap);
  }
  // The first style at the least cap, for goal_threshold(), suffices for nearly every load: the
  // opening. Where it fails the search starts over.
  UEC_HD int32_t take_cap(const int32_t* counts) {
    const int32_t end = aim_ == Aim::kOpening ? kNumOrders : kNumVariants;
    int32_t best = -1, v = first_;
    for (; v < first_ + teams_.size() && v < end; ++v) {
      if (v % kNumOrders == 0 && found_.variant >= 0) break;
      if (prefer_fewer(counts[v - first_], v)) best = v - first_;
    }
    first_ = v;
    if (found_.variant >= 0 && (v % kNumOrders == 0 || v == end)) {
      begin_improvement();
    } else if (v == end && aim_ == Aim::kOpening) {
      begin_thresholds();
    } else if (v == end && !allow_imports()) {
      const int32_t next = next_cap(cap_, slots_);
      if (improves_ && next < 2 * last_cap_)
        begin_cap(next);
      else
        aim_ = Aim::kDone;
    }
    return best;
  }
  // Asks the same again with more imports, unless that was asked already.
  UEC_HD bool allow_imports() {
    if (stage_ != Stage::kOneImport || slots_ == 1) return false;
    stage_ = Stage::kGoal;
    first_ = 0;
    return true;
  }
  // Whether the plan that a variant has found is the best so far.
  UEC_HD bool prefer_fewer(int32_t count, int32_t variant) {
    if (count < 0 || (found_.variant >= 0 && count >= found_.num_replicas)) return false;
    found_ = {count, variant};
    return true;
  }

  // ---- with the same cap and no more replicas, less imbalance: six steps of bisection. The teams
  // ask about the next few at once, before the outcome of the first is known: team t asks about
  // node t + 1 of the tree of steps, where 2 n follows a success of node n, and 2 n + 1 a failure.
  // Half of the steps at a time: more teams would slow each other down.

  static constexpr int32_t kImprovementSteps = 6, kMaxNodes = 7;

  UEC_HD void begin_improvement() {
    aim_ = Aim::kImprovement;
    low_ = goal_.mean - 1;
    steps_ = improves_ && found_.num_replicas > 0 ? kImprovementSteps : 0;
    if (steps_ == 0 || high_ - low_ <= 1) aim_ = Aim::kDone;
  }
  // What is asked at a node.
  UEC_HD Question at_node(int32_t node) const {
    int32_t depth = 0;
    while (node >> (depth + 1) != 0) ++depth;
    int64_t low = low_, high = high_;
    bool is_asked = node <= kMaxNodes && depth < steps_ && high - low > 1;
    for (int32_t d = depth; d > 0 && is_asked; --d) {
      ((node >> (d - 1) & 1) == 0 ? high : low) = low + (high - low) / 2;
      is_asked = high - low > 1;
    }
    return make(low + (high - low) / 2, cap_, is_asked ? found_.variant : kNumVariants,
                found_.num_replicas);
  }
  UEC_HD int32_t take_improvement(const int32_t* counts) {
    int32_t best = -1;
    for (int32_t n = 1; n <= min32(teams_.size(), kMaxNodes) && aim_ != Aim::kDone;) {
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

  const TeamSet& teams_;
  const SortedLoad& sorted_;
  const Goal& goal_;
  const int32_t p_;
  const int32_t slots_, last_cap_;
  Aim aim_ = Aim::kDone;
  Stage stage_ = Stage::kGoal;
  bool improves_ = false;
  int32_t cap_ = 0, first_ = 0, steps_ = 0;  // first_: variant of this round
  int64_t step_ = 0, low_ = 0, high_ = 0, asked_ = 0;
  Found found_;
};

}  // namespace uec::detail
