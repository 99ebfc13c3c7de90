// A probe (probe.hpp) that keeps the cool ranks in the registers of a team, for loads small enough
// to be packed.
//
// Every member holds some ranks of the pool, in no order: a rank's key is its slack and, in the
// bits below, its turn in the list, so that one exchange between the members finds a taker, and
// nothing moves. On a device that takes a fifth of the cycles that the list in memory takes, where
// members synchronise at each step of a search and of a move.
#pragma once

#include "core/plan/probe.hpp"
#include "core/plan/sorted_load.hpp"

namespace uec {

// How many ranks of a pool a member can hold.
inline constexpr int32_t kMaxPlaces = 3;

// Whether a packed probe can answer this. The same for all members.
template <class Team>
UEC_HD bool can_pack(Team team, const Pool& pool, const Question& ask);

// As probe(), with the same answer. Any member may write `trial`.
template <int32_t kPlaces, class Team>
UEC_HD int32_t packed_probe(Team team, const Pool& pool, const Question& ask, Replica* trial);

// Runs the faster of the two probes that can answer this for the p-th pool.
template <class Team>
UEC_HD int32_t fastest_probe(Team team, const SortedLoad& sorted, int32_t p, const Question& ask,
                             const ProbeScratch& scratch, Replica* trial) {
  const Pool pool = sorted.pool(p);
  if (!can_pack(team, pool, ask)) return probe(team, pool, ask, scratch, trial);
  if (pool.num_ranks <= 2 * team.size()) return packed_probe<2>(team, pool, ask, trial);
  return packed_probe<kMaxPlaces>(team, pool, ask, trial);
}
UEC_HD inline int32_t fastest_probe(Alone alone, const SortedLoad& sorted, int32_t p,
                                    const Question& ask, const ProbeScratch& scratch,
                                    Replica* trial) {
  return probe(alone, sorted.pool(p), ask, scratch, trial);
}

// ---------------------------------------------------------------------------------------------
// Implementation

namespace detail {

inline constexpr int32_t kMost = 0x7FFFFFFF;
inline constexpr uint32_t kNoKey = ~0u;

// Turns stay below this: one for every rank, one for each replica's taker and one for each exporter
// that joins.
UEC_HD inline int64_t num_turns(const Pool& pool, const Question& ask) {
  return int64_t{pool.num_ranks} * (ask.max_imports + 2);
}

// A member's ranks: place p is rank index() + p * size() of the pool. A rank that takes nothing has
// a slack of -1, and no key.
//
// Keys are ordered as CoolRanks is: by ascending slack, the latest first among equals, so turns
// count down. A mask reverses the order.
template <int32_t kPlaces>
struct PackedRanks {
  int32_t largest, turn_bits;
  uint32_t mask;
  int32_t slack[kPlaces], left[kPlaces];
  int32_t later[kPlaces];  // tokens that it can take after its next replica
  int32_t lost[kPlaces];   // as Prober::lost()
  uint32_t key[kPlaces];

  UEC_HD uint32_t make_key(int32_t tokens, int32_t turn) const {
    return ((static_cast<uint32_t>(tokens) << turn_bits) + static_cast<uint32_t>(turn)) ^ mask;
  }
  UEC_HD int32_t slack_of(uint32_t its_key, uint32_t its_mask) const {
    return static_cast<int32_t>((its_key ^ its_mask) >> turn_bits);
  }
  // How much more is lost once it has taken `quota`.
  UEC_HD int32_t cost(int32_t p, int32_t quota) const {
    return max32(slack[p] - quota - later[p], 0) - lost[p];
  }
  UEC_HD void put(int32_t p, int32_t tokens, int32_t replicas, int32_t turn) {
    slack[p] = tokens;
    left[p] = replicas;
    later[p] = (replicas - 1) * largest;
    lost[p] = max32(tokens - later[p] - largest, 0);
    key[p] = tokens < 0 ? kNoKey : make_key(tokens, turn);
  }
  // `rest`: tokens that the taker can still take, with the key that this gives it.
  UEC_HD void take(int32_t p, bool takes, int32_t rest, uint32_t next_key) {
    const bool stays = left[p] > 1 && rest > 0;
    const int32_t next = later[p] - largest;
    left[p] -= takes;
    slack[p] = takes ? (stays ? rest : -1) : slack[p];
    key[p] = takes ? (stays ? next_key : kNoKey) : key[p];
    lost[p] = takes ? max32(rest - later[p], 0) : lost[p];
    later[p] = takes ? next : later[p];
  }
};

// Who takes part of a need: its key under the mask, or kNoKey if no rank can.
struct PackedChoice {
  uint32_t key, mask;
  int32_t quota;
};

// As Prober::choose() where no rank can take all of `need`.
template <int32_t kPlaces, class Team>
UEC_HD PackedChoice choose_part(Team team, const PackedRanks<kPlaces>& cool, int32_t style,
                                int32_t need, int32_t have, int32_t spare) {
  constexpr uint32_t kDescending = kMost;
  uint32_t above = kNoKey, below = kNoKey;
  for (int32_t p = 0; p < kPlaces; ++p) {
    if (cool.slack[p] >= need)
      above = min_u32(above, cool.key[p]);
    else if (cool.slack[p] >= 0)
      below = min_u32(below, cool.key[p] ^ cool.mask ^ kDescending);
  }
  above = team.lowest(above);
  below = team.lowest(below);
  PackedChoice choice;
  if (above != kNoKey && (below == kNoKey || style != kTight)) {
    choice.key = above;
    choice.mask = cool.mask;
    choice.quota = min32(have, cool.slack_of(above, cool.mask));
    uint32_t cost = 0;
    for (int32_t p = 0; p < kPlaces; ++p)
      if (cool.key[p] == above) cost = static_cast<uint32_t>(cool.cost(p, choice.quota));
    if (static_cast<int32_t>(team.sum(cost)) <= spare) return choice;
  }
  choice.key = below;
  choice.mask = kDescending;
  choice.quota = min32(have, cool.slack_of(below, kDescending));
  return choice;
}

}  // namespace detail

template <class Team>
UEC_HD bool can_pack(Team team, const Pool& pool, const Question& ask) {
  const int64_t limit = detail::kMost / 2;
  return pool.rank_tokens != nullptr && pool.num_ranks <= kMaxPlaces * team.size() &&
         (pool.max_mains <= team.size() || ask.max_exports <= team.size()) &&
         pool.fullest() <= limit && ask.threshold * pool.num_ranks <= limit &&
         (ask.threshold + 1) * detail::num_turns(pool, ask) <= limit &&
         int64_t{pool.largest} * max32(ask.max_imports, team.size()) <= limit;
}

template <int32_t kPlaces, class Team>
UEC_HD int32_t packed_probe(Team team, const Pool& pool, const Question& ask, Replica* trial) {
  const int32_t order = ask.variant % kNumOrders, style = ask.variant / kNumOrders;
  const int32_t n = pool.num_ranks, size = team.size(), index = team.index();
  const auto threshold = static_cast<int32_t>(ask.threshold);
  detail::PackedRanks<kPlaces> cool;
  cool.largest = pool.largest;
  cool.mask = style == kWide ? static_cast<uint32_t>(detail::kMost) : 0;
  cool.turn_bits = 0;
  while (detail::num_turns(pool, ask) >> cool.turn_bits != 0) ++cool.turn_bits;
  int32_t turn = n * (ask.max_imports + 1);

  int32_t num_hot = 0;
  uint32_t lost = 0;
  for (int32_t p = 0; p < kPlaces; ++p) {
    const int32_t i = index + p * size;
    const int32_t room = i < n ? threshold - pool.rank_tokens[i] : 0;
    num_hot += team.count(room < 0).all;
    cool.put(p, room > 0 ? room : -1, ask.max_imports, turn + i);
    lost += static_cast<uint32_t>(cool.lost[p]);
  }
  if (num_hot == 0) return 0;
  const int64_t room = ask.threshold * n - (pool.tokens_before[n] - pool.tokens_before[0]);
  const int64_t fillable = room - team.sum(lost);
  if (fillable < 0) return -1;
  auto spare = static_cast<int32_t>(fillable);  // room that may be left unfillable

  // Each member holds one of the exporter's mains: what is left of it and, in the bits below, which
  // one comes first. For the next exporter these are prefetched, and for the one after it their
  // location: each is a load that depends on another.
  const auto place_of = [&](int32_t h) {
    return detail::nth_hot(order, min32(h, num_hot - 1), num_hot);
  };
  const auto open_tokens = [&](const MainsRow& row) {
    return index < min32(row.count, ask.max_exports) ? pool.main_tokens[row.begin + index] : 0;
  };
  int32_t next = place_of(0), after = place_of(1);
  MainsRow next_row = pool.rows[next], row_after = pool.rows[after];
  int32_t next_load = pool.rank_tokens[next];
  int32_t next_have = open_tokens(next_row), next_most = pool.main_tokens[next_row.begin];

  int32_t count = 0;
  UEC_ROLLED
  for (int32_t h = 0; h < num_hot; ++h) {
    const int32_t hot = next, begin = next_row.begin;
    int32_t have = next_have * size + size - 1 - index;
    int32_t main = 0, most = next_most, excess = next_load - threshold;
    next = after;
    next_row = row_after;
    next_load = pool.rank_tokens[next];
    next_have = open_tokens(next_row);
    next_most = pool.main_tokens[next_row.begin];
    after = place_of(h + 2);
    row_after = pool.rows[after];
    UEC_ROLLED
    for (;;) {
      const int32_t need = min32(most, excess);
      uint32_t lowest = detail::kNoKey;
      for (int32_t p = 0; p < kPlaces; ++p) {
        // Computes both: a branch would cost more.
        const bool fits = (cool.slack[p] >= need) & (cool.cost(p, need) <= spare);
        lowest = fits ? min_u32(lowest, cool.key[p]) : lowest;
      }
      int32_t quota = need;
      uint32_t taker = team.lowest(lowest);
      if (taker == detail::kNoKey) {
        const detail::PackedChoice choice =
            detail::choose_part(team, cool, style, need, most, spare);
        if (choice.key == detail::kNoKey) return -1;
        taker = choice.key ^ choice.mask ^ cool.mask;
        quota = choice.quota;
      }
      --turn;
      const int32_t rest = cool.slack_of(taker, cool.mask) - quota;
      const uint32_t next_key = cool.make_key(rest, turn);
      int32_t place = -1, left = 0, cost = 0;
      for (int32_t p = 0; p < kPlaces; ++p) {
        const bool takes = cool.key[p] == taker;
        place = takes ? index + p * size : place;
        left = takes ? cool.left[p] : left;
        cost = takes ? cool.cost(p, quota) : cost;
        cool.take(p, takes, rest, next_key);
      }
      if (place >= 0) trial[count] = {begin + main, place, ask.max_imports - left, quota};
      if (index == main) have -= quota * size;
      excess -= quota;
      ++count;
      spare -= static_cast<int32_t>(team.sum(static_cast<uint32_t>(cost)));
      if (excess <= 0) break;
      const auto best =
          detail::kMost -
          static_cast<int32_t>(team.lowest(static_cast<uint32_t>(detail::kMost - have)));
      most = best / size;
      main = size - 1 - best % size;
      if (most == 0) return -1;  // `max_exports` mains do not have the excess
    }
    if (excess >= 0) continue;
    --turn;
    for (int32_t p = 0; p < kPlaces; ++p)
      if (hot == index + p * size) cool.put(p, -excess, ask.max_imports, turn);
  }
  return count;
}

}  // namespace uec
