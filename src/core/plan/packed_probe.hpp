// A probe (probe.hpp) that keeps the cool ranks in the registers of a team, for loads small enough
// to be packed.
//
// Every member holds some ranks of the pool, in no order: a rank is one word, from which follows
// all that a replica there changes. So one exchange between the members finds a taker, and nothing
// moves. On a device a list in memory takes several times as long: members synchronise at each step
// of a search and of a move.
#pragma once

#include "core/plan/probe.hpp"
#include "core/plan/sorted_load.hpp"

namespace uec {

// How many ranks of a pool a member can hold.
inline constexpr int32_t kMaxPlaces = 3;

// Whether a packed probe can answer this. The same for all members.
template <class Team>
UEC_HD bool can_pack(Team team, const Pool& pool, const Question& question);

// Gives the same answer as probe(). Any member may write `trial`.
template <int32_t kPlaces, class Team>
UEC_HD int32_t packed_probe(Team team, const Pool& pool, const Question& question, Replica* trial);

// Runs the faster of the two probes that can answer this for the p-th pool.
template <class Team>
UEC_HD int32_t fastest_probe(Team team, const SortedLoad& sorted, int32_t p,
                             const Question& question, const ProbeScratch& scratch,
                             Replica* trial) {
  const Pool pool = sorted.pool(p);
  if (!can_pack(team, pool, question)) return probe(team, pool, question, scratch, trial);
  if (pool.num_ranks <= 2 * team.size()) return packed_probe<2>(team, pool, question, trial);
  return packed_probe<kMaxPlaces>(team, pool, question, trial);
}
UEC_HD inline int32_t fastest_probe(SingleThread alone, const SortedLoad& sorted, int32_t p,
                                    const Question& question, const ProbeScratch& scratch,
                                    Replica* trial) {
  return probe(alone, sorted.pool(p), question, scratch, trial);
}

// ---------------------------------------------------------------------------------------------
// Implementation

namespace detail {

inline constexpr uint32_t kNoKey = ~0u;

// A cool rank's key is the complement of a word that has, from the top, its slack, its turn in the
// list, and the complement of its next slot. kNoKey: it takes nothing.
//
// So keys are in the reverse order of CoolRanks: by descending slack, the latest last among equals,
// as turns count down. There is one for every rank, one for each replica's taker and one for each
// exporter that joins.
struct KeyBits {
  int32_t slot, low;  // bits of the last field; of the last two

  UEC_HD KeyBits(int64_t num_ranks, int32_t max_imports)
      : slot(num_bits(max_imports - 1)), low(slot + num_bits(num_ranks * (max_imports + 2) - 1)) {}

  UEC_HD uint32_t key(int32_t slack, int32_t turn, int32_t next_slot) const {
    return ~((static_cast<uint32_t>(slack) << low) + static_cast<uint32_t>((turn + 1) << slot) - 1 -
             static_cast<uint32_t>(next_slot));
  }
  UEC_HD int32_t slack_of(uint32_t key) const { return static_cast<int32_t>(~key >> low); }
};

}  // namespace detail

template <class Team>
UEC_HD bool can_pack(Team team, const Pool& pool, const Question& question) {
  constexpr int64_t kLimit = (int64_t{1} << 30) - 1;
  const int32_t low = min32(detail::KeyBits(pool.num_ranks, question.max_imports).low, 31);
  return pool.rank_tokens != nullptr && question.variant / kNumOrders != kLevel &&
         pool.num_ranks <= kMaxPlaces * team.size() &&
         (pool.max_local_experts <= team.size() || question.max_exports <= team.size()) &&
         pool.fullest() <= kLimit && question.threshold * pool.num_ranks <= kLimit &&
         int64_t{pool.largest} * max32(question.max_imports, team.size()) <= kLimit &&
         max64(pool.largest, question.threshold) >> (31 - low) == 0;
}

template <int32_t kPlaces, class Team>
UEC_HD int32_t packed_probe(Team team, const Pool& pool, const Question& question, Replica* trial) {
  const int32_t order = question.variant % kNumOrders, style = question.variant / kNumOrders;
  const int32_t n = pool.num_ranks, size = team.size(), index = team.index();
  const auto threshold = static_cast<int32_t>(question.threshold);
  const int32_t largest = pool.largest;
  const detail::KeyBits bits(n, question.max_imports);
  // Reads it from another member so that a device keeps it in a register instead of recomputing it.
  const uint32_t slots = team.min_unordered((1u << bits.slot) - 1);
  const auto slot_of = [&](uint32_t key) { return static_cast<int32_t>(key & slots); };
  int32_t turn = n * (question.max_imports + 1);
  // Tokens that a rank's next replica brings, if no room is to be lost, are these or `largest`.
  const int32_t most_later = (question.max_imports - 1) * largest;
  const auto beyond_slots = [&](int32_t slack, int32_t slot) {
    return slack - most_later + slot * largest;
  };

  // Place p is rank index + p * size of the pool.
  uint32_t keys[kPlaces];
  int32_t due[kPlaces];
  int32_t num_hot = 0;
  uint32_t lost = 0;
  for (int32_t p = 0; p < kPlaces; ++p) {
    const int32_t i = index + p * size;
    const int32_t room = i < n ? threshold - pool.rank_tokens[i] : 0;
    num_hot += team.count(room < 0).all;
    keys[p] = room > 0 ? bits.key(room, turn + i, 0) : detail::kNoKey;
    due[p] = min32(beyond_slots(room, 0), largest);
    lost += static_cast<uint32_t>(max32(beyond_slots(room, 0) - largest, 0));
  }
  if (num_hot == 0) return 0;
  const int64_t room = question.threshold * n - (pool.tokens_before[n] - pool.tokens_before[0]);
  const int64_t fillable = room - team.sum(lost);
  if (fillable < 0 || !detail::may_suffice(pool, question, num_hot)) return -1;
  // Room that may become unfillable: some rank has room until all excess is gone.
  auto waste_left = static_cast<int32_t>(fillable);

  // Each member prefetches one of the next exporters, with its first local expert.
  struct Exporter {
    int32_t begin, excess;
    int32_t all, extra;  // of the first expert's tokens: to be exported, and others
    int32_t end;         // as long as so many are to be exported, it stays the first
  };
  const auto look_at = [&](int32_t h) {
    const int32_t place = detail::nth_hot(order, min32(h, num_hot - 1), num_hot);
    const LocalRow row = pool.rows[place];
    const int32_t* const tokens = pool.local_tokens + row.begin;
    Exporter from;
    from.begin = row.begin;
    from.excess = pool.rank_tokens[place] - threshold;
    from.all = min32(tokens[0], from.excess);
    from.extra = tokens[0] - from.all;
    from.end = max32((min32(row.count, question.max_exports) > 1 ? tokens[1] : 0) - from.extra, 1);
    return from;
  };
  Exporter mine = look_at(index), next = team.read_from(0, mine);
  // What an expert lacks to be as large as the largest of all and, in the bits below, which it is.
  const auto lack = [&](int32_t tokens, int32_t which) {
    return static_cast<uint32_t>((largest - tokens) * size + which);
  };
  const auto members = static_cast<uint32_t>(size);
  const uint32_t most_lack = lack(1, size - 1);  // more is no token

  // Among ranks that take a need whole the last comes first; kWide: the first.
  const uint32_t mask = style == kWide ? 0 : ~0u;
  const auto find_widest = [&] {
    uint32_t first = keys[0];
    for (int32_t p = 1; p < kPlaces; ++p) first = min_u32(first, keys[p]);
    return team.min_unordered(first);
  };
  uint32_t widest = find_widest();

  const int32_t max_count = min32(question.max_replicas, n * question.max_imports);
  int32_t count = 0;
  UEC_ROLLED
  for (int32_t h = 0; h < num_hot; ++h) {
    Exporter from = next;
    if ((h + 1) % size == 0) mine = look_at(h + 1 + index);
    next = team.read_from((h + 1) % size, mine);
    const int32_t limit = max_count - (num_hot - 1 - h);  // the others take one at least
    int32_t best = 0;
    bool is_listed = false;
    uint32_t own = 0;  // of its local experts, each member lists one
    UEC_ROLLED
    for (;;) {
      int32_t need = from.all;
      UEC_ROLLED
      do {
        uint32_t taker = widest, key = detail::kNoKey;
        int32_t quota = bits.slack_of(taker);
        if (quota >= need) {  // else the widest gap is filled, and no other can take the need
          const uint32_t fitting = ~(static_cast<uint32_t>(need) << bits.low);
          const int32_t reach = need + waste_left;
          uint32_t found = detail::kNoKey;
          for (int32_t p = 0; p < kPlaces; ++p) {
            const bool fits = (keys[p] <= fitting) & (due[p] <= reach);
            found = min_u32(found, fits ? keys[p] ^ mask : detail::kNoKey);
          }
          found = team.min_unordered(found);
          taker = found ^ mask;
          quota = need;
          if (found == detail::kNoKey) {  // room would be lost
            uint32_t above = detail::kNoKey, below = detail::kNoKey;
            for (int32_t p = 0; p < kPlaces; ++p) {
              if (keys[p] <= fitting)
                above = min_u32(above, keys[p] ^ mask);
              else
                below = min_u32(below, keys[p]);
            }
            taker = team.min_unordered(above) ^ mask;
            below = team.min_unordered(below);
            // More than the need, if the expert has it: then the exporter joins.
            quota = min32(from.extra + need, bits.slack_of(taker));
            const int32_t its_due =
                min32(beyond_slots(bits.slack_of(taker), slot_of(taker)), largest);
            if (its_due - quota > waste_left || (below != detail::kNoKey && style == kTight)) {
              if (below == detail::kNoKey) return -1;
              taker = below;
              quota = bits.slack_of(below);
            }
          }
          const int32_t slack = bits.slack_of(taker), slot = slot_of(taker);
          const int32_t rest = slack - quota, beyond = beyond_slots(slack, slot);
          waste_left -= max32(min32(beyond, largest) - quota, 0);
          --turn;
          if (rest > 0 && slot < question.max_imports - 1) key = bits.key(rest, turn, slot + 1);
          const int32_t next_due = min32(beyond - quota, 0) + largest;
          for (int32_t p = 0; p < kPlaces; ++p) due[p] = keys[p] == taker ? next_due : due[p];
        }
        need -= quota;
        int32_t place = -1;
        for (int32_t p = 0; p < kPlaces; ++p) {
          const bool takes = keys[p] == taker;
          keys[p] = takes ? key : keys[p];
          place = takes ? index + p * size : place;
        }
        widest = find_widest();
        if (place >= 0) *trial = {from.begin + best, place, slot_of(taker), quota};
        ++count;
        ++trial;
      } while ((need >= from.end) & (count <= limit));
      if (count > limit) return -1;
      from.excess -= from.all - need;
      if (from.excess <= 0) break;
      // Continues with the exporter's next expert.
      if (!is_listed) {
        const LocalRow row = pool.rows[detail::nth_hot(order, h, num_hot)];
        const bool is_open = index < min32(row.count, question.max_exports);
        own = lack(is_open ? pool.local_tokens[row.begin + index] : 0, index);
      }
      is_listed = true;
      if (index == best) own = lack(from.extra + need, best);
      const uint32_t first = team.min_unordered(own);
      if (first > most_lack) return -1;  // `max_exports` local experts do not have the excess
      best = static_cast<int32_t>(first % members);
      const uint32_t second =
          team.min_unordered(index == best ? most_lack : min_u32(own, most_lack));
      const int32_t most = largest - static_cast<int32_t>(first / members);
      from.all = min32(most, from.excess);
      from.extra = most - from.all;
      from.end = max32(from.all - static_cast<int32_t>((second - first) / members), 1);
    }
    if (from.excess == 0) continue;
    const int32_t joins = detail::nth_hot(order, h, num_hot);
    --turn;
    for (int32_t p = 0; p < kPlaces; ++p) {
      if (joins != index + p * size) continue;
      keys[p] = bits.key(-from.excess, turn, 0);
      due[p] = min32(beyond_slots(-from.excess, 0), largest);
    }
    widest = find_widest();
  }
  return count;
}

}  // namespace uec
