// One probe of the planner: whether the ranks of a pool can be brought down to a threshold, and
// how.
//
// A pure function of the pool and the question, so that any number of probes may run side by side,
// on a device too, and give the same plan.
#pragma once

#include <cstdint>

#include "core/common.hpp"

namespace uec {

// One replica: `quota` tokens of `expert` are served by `rank`. The quota is never zero.
struct Replica {
  int32_t expert;
  int32_t rank;
  int32_t quota;
};

// Ranks that may hold each other's experts: what does not change between probes. Borrowed arrays.
struct Pool {
  const int32_t* ranks = nullptr;  // [num_ranks] by descending load, then id
  int32_t num_ranks = 0;
  const int64_t* load = nullptr;         // [E]
  const int64_t* rank_load = nullptr;    // [G] tokens on a rank without replicas
  const int32_t* mains_begin = nullptr;  // [G + 1]
  const int32_t* mains = nullptr;        // [E] by home; an exporter's by descending load, then id
  int64_t largest = 0;                   // tokens of the largest expert

  UEC_HD int64_t fullest() const { return rank_load[ranks[0]]; }
};

// Probes differ in the order in which they visit the ranks that are too full ("hot"), variant %
// kNumOrders: by descending load, by ascending load, or from both ends in turn; and in the style,
// variant / kNumOrders, in which they fill gaps: see probe().
inline constexpr int32_t kNumOrders = 3;
inline constexpr int32_t kTight = 0, kEarly = 1, kWide = 2;
inline constexpr int32_t kNumVariants = 3 * kNumOrders;

struct Question {
  int64_t threshold;    // tokens that no rank may pass
  int32_t max_imports;  // replicas on a rank, at most its slots
  int32_t max_exports;  // experts that a rank may export: enough for the excess of each
  int32_t variant;      // below kNumVariants
};

// A rank below the threshold.
struct CoolRank {
  int64_t slack;  // tokens it may still take, never 0
  int32_t rank;
  int32_t left;  // replicas it may still take, never 0
};

struct ProbeScratch {
  int64_t* have;   // [mains of a rank] tokens left on the mains of the rank that is exporting
  CoolRank* cool;  // [ranks of the pool]
};

// Returns the number of replicas in `trial`, or -1 where the probe finds no room.
//
// A hot rank exports from the main that has most left, among its `max_exports` largest. A need goes
// whole to the tightest gap that takes all of it (kWide: to the widest). Where that would leave
// more room unfillable than the pool can spare, a gap is filled to the brim instead: the largest
// one below the need, or one above it, with more than the need. In the latter case the exporter
// drops below the threshold by just as much and joins the cool ranks: a chain. So room that has no
// slot left moves to a rank that has. kTight chains only where no gap is below the need, kEarly and
// kWide as soon as they can. (With as many experts as ranks and one slot each, this is Vose's way
// to build alias tables, which always reaches the mean.)
//
// No rank is given an expert twice: a replica uses up the need, the main's tokens or the room. Each
// takes a slot, so there are at most num_ranks * max_imports of them, and as many steps, each of
// O(ranks of the pool + mains of a rank).
UEC_HD inline int32_t probe(const Pool& pool, const Question& ask, const ProbeScratch& scratch,
                            Replica* trial);

// ---------------------------------------------------------------------------------------------
// Implementation

namespace detail {

// The n-th hot rank in an order.
UEC_HD inline int32_t nth_hot(int32_t order, int32_t n, int32_t num_hot) {
  const bool from_the_end = order == 1 || (order == 2 && n % 2 == 1);
  if (order == 2) n /= 2;
  return from_the_end ? num_hot - 1 - n : n;
}

// The cool ranks, by ascending slack.
struct CoolRanks {
  CoolRank* entry;
  int32_t count = 0;

  // The first with at least that much slack, or `count`.
  UEC_HD int32_t find(int64_t slack) const {
    int32_t low = 0, high = count;
    while (low < high) {
      const int32_t middle = (low + high) / 2;
      if (entry[middle].slack < slack)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
  UEC_HD void insert(CoolRank added) {
    int32_t i = count++;
    for (; i > 0 && entry[i - 1].slack >= added.slack; --i) entry[i] = entry[i - 1];
    entry[i] = added;
  }
  UEC_HD void remove(int32_t i) {
    for (--count; i < count; ++i) entry[i] = entry[i + 1];
  }
};

// A probe under way.
struct Prober {
  const Question& ask;
  int64_t largest;
  CoolRanks cool;
  int64_t spare = 0;  // room that may be left unfillable

  // Room on a cool rank that no choice of `left` more experts can fill.
  UEC_HD int64_t lost(int64_t slack, int32_t left) const {
    return max64(slack - left * largest, 0);
  }
  // How much more of it there is once the i-th cool rank has taken `quota`.
  UEC_HD int64_t costs(int32_t i, int64_t quota) const {
    const CoolRank& c = cool.entry[i];
    return lost(c.slack - quota, c.left - 1) - lost(c.slack, c.left);
  }

  // Returns how many ranks of the pool are too full, or -1 if the others have too little room.
  UEC_HD int32_t begin(const Pool& pool) {
    int32_t num_hot = 0;
    for (int32_t i = 0; i < pool.num_ranks; ++i) {
      const int64_t slack = ask.threshold - pool.rank_load[pool.ranks[i]];
      spare += slack;
      num_hot += slack < 0;
      if (slack <= 0) continue;
      cool.entry[cool.count++] = {slack, pool.ranks[i], ask.max_imports};
      spare -= lost(slack, ask.max_imports);
    }
    return num_hot > 0 && spare < 0 ? -1 : num_hot;
  }

  // The cool rank that takes `need`, of a main that has `have`; -1: none. `quota`: what it takes.
  UEC_HD int32_t choose(int64_t need, int64_t have, int64_t* quota) const {
    const int32_t style = ask.variant / kNumOrders;
    const int32_t above = cool.find(need);
    const int32_t preferred = style == kWide && above < cool.count ? cool.count - 1 : above;
    *quota = need;
    for (int32_t at = preferred; at >= above && at < cool.count; at += style == kWide ? -1 : 1)
      if (costs(at, need) <= spare) return at;
    if (preferred < cool.count && (above == 0 || style != kTight)) {
      *quota = min64(have, cool.entry[preferred].slack);
      if (costs(preferred, *quota) <= spare) return preferred;
    }
    if (above > 0) *quota = min64(have, cool.entry[above - 1].slack);
    return above - 1;
  }

  UEC_HD void fill(int32_t at, int64_t quota) {
    spare -= costs(at, quota);
    CoolRank taker = cool.entry[at];
    taker.slack -= quota;
    cool.remove(at);
    if (--taker.left > 0 && taker.slack > 0) cool.insert(taker);
  }
};

}  // namespace detail

UEC_HD inline int32_t probe(const Pool& pool, const Question& ask, const ProbeScratch& scratch,
                            Replica* trial) {
  detail::Prober prober{ask, pool.largest, {scratch.cool}};
  const int32_t num_hot = prober.begin(pool);
  if (num_hot < 0) return -1;
  int64_t* const have = scratch.have;
  int32_t count = 0;
  for (int32_t h = 0; h < num_hot; ++h) {
    const int32_t rank = pool.ranks[detail::nth_hot(ask.variant % kNumOrders, h, num_hot)];
    const int32_t* const mains = pool.mains + pool.mains_begin[rank];
    const int32_t num_mains = pool.mains_begin[rank + 1] - pool.mains_begin[rank];
    const int32_t num_open = num_mains < ask.max_exports ? num_mains : ask.max_exports;
    for (int32_t m = 0; m < num_open; ++m) have[m] = pool.load[mains[m]];
    int64_t excess = pool.rank_load[rank] - ask.threshold;
    while (excess > 0) {
      int32_t main = 0;
      for (int32_t m = 1; m < num_open; ++m)
        if (have[m] > have[main]) main = m;
      int64_t quota;
      const int32_t at = prober.choose(min64(have[main], excess), have[main], &quota);
      if (at < 0) return -1;
      trial[count++] = {mains[main], prober.cool.entry[at].rank, static_cast<int32_t>(quota)};
      prober.fill(at, quota);
      have[main] -= quota;
      excess -= quota;
    }
    if (excess < 0) prober.cool.insert({-excess, rank, ask.max_imports});
  }
  return count;
}

}  // namespace uec
