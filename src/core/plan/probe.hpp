// One probe of the planner: whether the ranks of a pool can be brought down to a threshold, and
// how.
//
// A pure function of the pool and the question, so that any number of probes may run in parallel,
// on a device too, and give the same plan. A team (team.hpp) runs one probe.
#pragma once

#include <cstdint>

#include "core/base/common.hpp"
#include "core/base/team.hpp"

namespace uec {

// One replica: `quota` tokens of an expert are served by a rank. The quota is never zero.
struct alignas(8) Replica {
  int32_t local_pos;  // of the expert: index into the pool's local_experts
  int32_t place;      // of the rank: index into the pool's ranks
  int32_t slot;       // of that rank: replicas come to a rank's slots in the order of the plan
  int32_t quota;
};

// The range of a rank's local experts.
struct LocalRow {
  int32_t begin, count;
};

// Ranks that may hold each other's experts: what does not change between probes. Borrowed arrays.
struct Pool {
  const int32_t* ranks = nullptr;  // [num_ranks] by descending load, then id
  int32_t num_ranks = 0;
  const int64_t* tokens_before = nullptr;  // [num_ranks + 1] tokens of `ranks`, running sums
  const int64_t* load = nullptr;           // [E]
  const int32_t* local_begin = nullptr;    // [G + 1]
  const int32_t* local_experts = nullptr;  // [E] by home; an exporter's by descending load, then id
  int32_t largest = 0;                     // tokens of the largest expert
  // Copies in 32 bits for packed probes (packed_probe.hpp); null where there are none. Entries of
  // 2^31 tokens and more are ignored.
  const int32_t* rank_tokens = nullptr;   // [num_ranks] without replicas
  const LocalRow* rows = nullptr;         // [num_ranks]
  const int32_t* local_tokens = nullptr;  // [E] of `local_experts`
  int32_t max_local_experts = 0;          // of a rank

  // Tokens on the i-th rank without replicas.
  UEC_HD int64_t rank_load(int32_t i) const { return tokens_before[i + 1] - tokens_before[i]; }
  UEC_HD int64_t fullest() const { return rank_load(0); }
};

// Probes differ in the order in which they visit the ranks that are too full ("hot"), variant %
// kNumOrders: by descending load, by ascending load, or from both ends in turn; and in the style,
// variant / kNumOrders, in which they fill gaps: see probe(). kLevel, the last one, has one order
// of its own: see level_probe().
inline constexpr int32_t kNumOrders = 3;
inline constexpr int32_t kTight = 0, kEarly = 1, kWide = 2, kLevel = 3;
inline constexpr int32_t kNumVariants = kLevel * kNumOrders + 1;

struct Question {
  int64_t threshold;    // tokens that no rank may pass
  int32_t max_imports;  // replicas on a rank, at most its slots
  int32_t max_exports;  // experts that a rank may export
  int32_t variant;      // below kNumVariants
  int32_t max_replicas;
};

// A rank below the threshold; for kLevel any rank.
struct CoolRank {
  int64_t slack;  // tokens it may still take, never 0; for kLevel also 0, or below
  int32_t place;  // among the pool's ranks
  int32_t left;   // replicas it may still take, never 0
};

// Shared by a team's members.
struct ProbeScratch {
  int32_t* tokens_left;  // [E] tokens left on the local experts of the rank that is exporting, from
                         // 0; for kLevel on all ranks', by their index in the pool's
  CoolRank* cool;        // [ranks of the pool]
};

// Returns the number of replicas in `trial`, or -1 if the probe finds no room or takes more than
// `max_replicas`. The leader writes `trial`. The members synchronise before and after, because the
// scratch is in use.
//
// A hot rank exports the local expert with most tokens left, among its `max_exports` largest. A
// need goes whole to the tightest gap that takes all of it (kWide: to the widest). Where that would
// leave more room unfillable than the pool can spare, a gap is filled completely instead: the
// largest one below the need, or one above it, with more than the need. In the latter case the
// exporter drops below the threshold by just as much and joins the cool ranks: a chain. So room
// that has no slot left moves to a rank that has. kTight chains only where no gap is below the
// need, kEarly and kWide as soon as they can. (With as many experts as ranks and one slot each,
// this is Vose's way to build alias tables, which always reaches the mean.)
//
// No rank is given an expert twice: a replica uses up the need, the expert's tokens or the room.
// Each takes a slot, so there are at most num_ranks * max_imports of them, and as many steps, each
// of O((ranks of the pool + local experts of a rank) / members) and a few exchanges between
// members.
template <class Team>
UEC_HD int32_t probe(Team team, const Pool& pool, const Question& question,
                     const ProbeScratch& scratch, Replica* trial);

// ---------------------------------------------------------------------------------------------
// Implementation

namespace detail {

// The n-th hot rank in an order.
UEC_HD inline int32_t nth_hot(int32_t order, int32_t n, int32_t num_hot) {
  const bool from_the_end = order == 1 || (order == 2 && n % 2 == 1);
  if (order == 2) n /= 2;
  return from_the_end ? num_hot - 1 - n : n;
}

// Whether the ranks that `max_replicas` reach, the coolest at best, have room for the excess of the
// hot ones. (Chains take replicas, too, and only pass tokens on.)
UEC_HD inline bool may_suffice(const Pool& pool, const Question& question, int32_t num_hot) {
  const int64_t* const before = pool.tokens_before;
  const int32_t n = pool.num_ranks, first = max32(num_hot, n - question.max_replicas);
  return question.threshold * (n - first + num_hot) >=
         before[n] - before[first] + before[num_hot] - before[0];
}

// The cool ranks, by ascending slack; of equal ones, the latest first.
//
// Members read entries, then synchronise in min_sync() or sync(), then change some, then
// synchronise again: so a change happens after all earlier reads, and before all later ones.
template <class Team>
struct CoolRanks {
  Team team;
  CoolRank* entry;
  int32_t count = 0;

  // The first with at least that much slack, or `count`.
  UEC_HD int32_t find(int64_t slack) const {
    return bisect_first(team, 0, count, [&](int32_t i) { return entry[i].slack >= slack; });
  }
  UEC_HD void insert(CoolRank added) {
    put(added, count);
    ++count;
  }
  // `changed` has no more slack than the one it replaces.
  UEC_HD void replace(int32_t i, CoolRank changed) { put(changed, i); }

  UEC_HD void remove(int32_t removed) {
    --count;
    for (int32_t first = removed; first < count; first += team.size()) {
      const int32_t i = first + team.index();
      CoolRank moved{};
      if (i < count) moved = entry[i + 1];
      team.sync();
      if (i < count) entry[i] = moved;
    }
    team.sync();
  }

 private:
  // Inserts it among those below `end`, which is free: those with at least as much slack move up by
  // one.
  UEC_HD void put(CoolRank added, int32_t end) {
    int32_t at = end;
    for (;;) {
      const int32_t i = at - team.index();
      CoolRank moved{};
      if (i > 0) moved = entry[i - 1];
      const bool moves = i > 0 && moved.slack >= added.slack;
      const auto stays = static_cast<int32_t>(team.min_sync(moves ? team.size() : team.index()));
      if (moves) entry[i] = moved;
      at -= stays;
      if (stays < team.size()) break;
    }
    if (team.leader()) entry[at] = added;
    team.sync();
  }
};

// The local experts of a rank that exports. The first is the largest; what is left of each is
// listed only once a second replica is needed.
template <class Team>
struct Exporter {
  Team team;
  const int64_t* load;
  const int32_t* local_experts;
  int32_t begin;         // of them, in the pool's
  int32_t num_open;      // of them, that may be exported
  int32_t* tokens_left;  // [num_open] a member looks at its own only
  int32_t best = 0;      // the first with most tokens left
  int32_t best_left;     // tokens left on it
  bool listed = false;

  UEC_HD Exporter(Team members, const Pool& pool, int32_t rank, int32_t max_exports, int32_t* left)
      : team(members),
        load(pool.load),
        local_experts(pool.local_experts + pool.local_begin[rank]),
        begin(pool.local_begin[rank]),
        tokens_left(left) {
    const int32_t num_local_experts = pool.local_begin[rank + 1] - begin;
    num_open = num_local_experts < max_exports ? num_local_experts : max_exports;
    best_left = static_cast<int32_t>(load[local_experts[0]]);
  }

  // Takes `quota` from `best`, then finds the expert that has most left now.
  UEC_HD void take(int32_t quota) {
    if (!listed)
      for (int32_t m = team.index(); m < num_open; m += team.size())
        tokens_left[m] = static_cast<int32_t>(load[local_experts[m]]);
    listed = true;
    if (best % team.size() == team.index()) tokens_left[best] -= quota;
    int32_t own = team.index();
    for (int32_t m = own + team.size(); m < num_open; m += team.size())
      if (tokens_left[m] > tokens_left[own]) own = m;
    const int32_t left = own < num_open ? tokens_left[own] : -1;
    best_left =
        kMaxInt - static_cast<int32_t>(team.min_sync(static_cast<uint32_t>(kMaxInt) - left));
    best = static_cast<int32_t>(team.min_sync(left == best_left ? own : num_open));
  }

 private:
  static constexpr int32_t kMaxInt = 0x7FFFFFFF;
};

// A probe in progress.
template <class Team>
struct Prober {
  Team team;
  const Question& question;
  int32_t largest;
  int32_t style;
  CoolRanks<Team> cool;
  int64_t waste_left = 0;  // room that may still become unfillable

  // How much more room, that no choice of the experts it may still take can fill, there is on a
  // cool rank once it has taken `quota`.
  UEC_HD int64_t waste_of(const CoolRank& c, int64_t quota) const {
    const int64_t beyond = c.slack - static_cast<int64_t>(c.left) * largest;
    return max64(beyond + largest - quota, 0) - max64(beyond, 0);
  }

  // Returns how many ranks of the pool are too full, or -1 if the others have too little room.
  UEC_HD int32_t begin(const Pool& pool) {
    const int32_t n = pool.num_ranks;
    // The first from there on with that much slack: slack only grows along the list.
    const auto first_with = [&](int64_t slack, int32_t from) {
      if (from == n || question.threshold - pool.rank_load(from) >= slack) return from;
      return bisect_first(team, from + 1, n, [&](int32_t i) {
        return question.threshold - pool.rank_load(i) >= slack;
      });
    };
    const int32_t num_hot = first_with(0, 0);
    const int32_t first_cool = first_with(1, num_hot);
    const int64_t* const before = pool.tokens_before;
    waste_left = question.threshold * n - (before[n] - before[0]);
    const int64_t full = static_cast<int64_t>(question.max_imports) * largest;
    if (question.threshold - pool.rank_load(n - 1) > full) {
      const int32_t lossy = first_with(full + 1, first_cool);
      waste_left -= (question.threshold - full) * (n - lossy) - (before[n] - before[lossy]);
    }
    if (num_hot > 0 && (waste_left < 0 || !may_suffice(pool, question, num_hot))) return -1;
    cool.count = n - first_cool;
    for (int32_t i = team.index(); i < cool.count; i += team.size()) {
      const int32_t from = first_cool + i;
      cool.entry[i] = {question.threshold - pool.rank_load(from), from, question.max_imports};
    }
    team.sync();
    return num_hot;
  }

  // The first of the cool ranks from `above` up (kWide: from the last down) that can take `need`;
  // -1: none.
  UEC_HD int32_t first_fit(int32_t above, int64_t need, bool wide) const {
    const int32_t room = cool.count - above;
    for (int32_t first = 0; first < room; first += team.size()) {
      const int32_t n = first + team.index();
      const int32_t at = wide ? cool.count - 1 - n : above + n;
      const bool fits = n < room && waste_of(cool.entry[at], need) <= waste_left;
      const auto found = static_cast<int32_t>(team.min_sync(fits ? n : room));
      if (found < room) return wide ? cool.count - 1 - found : above + found;
    }
    return -1;
  }

  // The cool rank that takes `need`, of an expert that has `available`; -1: none. `quota`: what it
  // takes.
  UEC_HD int32_t choose(int64_t need, int64_t available, int64_t* quota) const {
    const int32_t above = cool.find(need);
    *quota = need;
    const int32_t at = first_fit(above, need, style == kWide);
    if (at >= 0) return at;
    if (above < cool.count && (above == 0 || style != kTight)) {
      const int32_t preferred = style == kWide ? cool.count - 1 : above;
      const CoolRank& c = cool.entry[preferred];
      *quota = min64(available, c.slack);
      if (waste_of(c, *quota) <= waste_left) return preferred;
    }
    if (above > 0) *quota = min64(available, cool.entry[above - 1].slack);
    return above - 1;
  }

  // Returns the taker as it was before.
  UEC_HD CoolRank fill(int32_t at, int64_t quota) {
    const CoolRank taker = cool.entry[at];
    waste_left -= waste_of(taker, quota);
    if (taker.left > 1 && taker.slack > quota)
      cool.replace(at, {taker.slack - quota, taker.place, taker.left - 1});
    else
      cool.remove(at);
    return taker;
  }
};

// The first of `count` with the highest value, none of which is negative.
template <class Team, class Value>
UEC_HD int32_t first_highest(Team team, int32_t count, const Value& value) {
  uint64_t most = 0;
  int32_t first = count;
  for (int32_t i = team.index(); i < count; i += team.size()) {
    const auto own = static_cast<uint64_t>(value(i)) + 1;
    if (own <= most) continue;
    most = own;
    first = i;
  }
  const uint64_t all = highest(team, most);
  return static_cast<int32_t>(team.min_sync(most == all ? first : count));
}

// probe() for kLevel. The fullest rank fills the emptiest one up, from its expert with most tokens
// left, until no rank is above the threshold. So a rank is filled once, by one rank, which may drop
// below the threshold and is then filled later.
//
// If all ranks are to come down to the mean, exactly, it takes at most ceil(M (G - 1) / G) slots,
// where M is the most local experts of a rank. Say the fullest has load L, and is to give s. It was
// never filled, so its tokens are on at most M local experts, and the largest ceil(s M / L) have s
// of them. At most G - 1 ranks have what the emptiest lacks: L is at least the mean + s / (G - 1).
// And s is at most the mean, so that s / L is at most (G - 1) / G. A padded giver has a token less
// than L says, but then all ranks below the mean were padded too (first_padded() of planner.hpp),
// and s is at most the mean - 1: (L - 1) is at least s + s / (G - 1).
template <class Team>
UEC_HD int32_t level_probe(Team team, const Pool& pool, const Question& question,
                           const ProbeScratch& scratch, Replica* trial) {
  constexpr int64_t kAboveAll = int64_t{1} << 62;
  const int32_t n = pool.num_ranks;
  const auto slack = [&](int32_t i) -> int64_t& { return scratch.cool[i].slack; };
  if (question.threshold * n < pool.tokens_before[n] - pool.tokens_before[0]) return -1;
  for (int32_t i = team.index(); i < n; i += team.size())
    slack(i) = question.threshold - pool.rank_load(i);
  for (int32_t i = 0; i < n && pool.rank_load(i) > question.threshold; ++i)
    for (int32_t m = pool.local_begin[pool.ranks[i]] + team.index();
         m < pool.local_begin[pool.ranks[i] + 1]; m += team.size())
      scratch.tokens_left[m] = static_cast<int32_t>(pool.load[pool.local_experts[m]]);
  team.sync();
  for (int32_t count = 0;;) {
    const int32_t from = first_highest(team, n, [&](int32_t i) { return kAboveAll - slack(i); });
    if (slack(from) >= 0) return count;
    const int32_t to = first_highest(team, n, [&](int32_t i) { return kAboveAll + slack(i); });
    const int64_t given = slack(to), after = slack(from) + given;
    const int32_t begin = pool.local_begin[pool.ranks[from]];
    const int32_t open =
        min32(pool.local_begin[pool.ranks[from] + 1] - begin, question.max_exports);
    int64_t need = given;
    for (int32_t slot = 0; need > 0; ++slot) {
      const int32_t best = begin + first_highest(team, open, [&](int32_t m) {
                             return scratch.tokens_left[begin + m];
                           });
      const int32_t available = scratch.tokens_left[best];
      if (slot == question.max_imports || available == 0 || count == question.max_replicas)
        return -1;
      const auto quota = static_cast<int32_t>(min64(available, need));
      need -= quota;
      team.sync();  // all have read
      if (team.leader()) {
        scratch.tokens_left[best] = available - quota;
        trial[count] = {best, to, slot, quota};
      }
      team.sync();
      ++count;
    }
    if (team.leader()) {
      slack(from) = after;
      slack(to) = 0;
    }
    team.sync();
  }
}

}  // namespace detail

template <class Team>
UEC_HD int32_t probe(Team team, const Pool& pool, const Question& question,
                     const ProbeScratch& scratch, Replica* trial) {
  if (question.variant / kNumOrders == kLevel)
    return detail::level_probe(team, pool, question, scratch, trial);
  detail::Prober<Team> prober{
      team, question, pool.largest, question.variant / kNumOrders, {team, scratch.cool}};
  const int32_t order = question.variant % kNumOrders;
  const int32_t num_hot = prober.begin(pool);
  if (num_hot < 0) return -1;
  int32_t count = 0;
  for (int32_t h = 0; h < num_hot; ++h) {
    const int32_t hot = detail::nth_hot(order, h, num_hot);
    const int32_t rank = pool.ranks[hot];
    detail::Exporter<Team> from(team, pool, rank, question.max_exports, scratch.tokens_left);
    int64_t excess = pool.rank_load(hot) - question.threshold;
    for (;;) {
      int64_t quota;
      const int32_t at = prober.choose(min64(from.best_left, excess), from.best_left, &quota);
      if (at < 0) return -1;
      const CoolRank taker = prober.fill(at, quota);
      const auto tokens = static_cast<int32_t>(quota);
      if (team.leader())
        trial[count] = {from.begin + from.best, taker.place, question.max_imports - taker.left,
                        tokens};
      ++count;
      excess -= quota;
      if (excess <= 0) break;
      from.take(tokens);
      if (from.best_left == 0) return -1;  // `max_exports` local experts do not have the excess
    }
    if (count + num_hot - 1 - h > question.max_replicas) return -1;
    if (excess < 0) prober.cool.insert({-excess, hot, question.max_imports});
  }
  return count;
}

}  // namespace uec
