// How many tokens of an expert one source rank sends to each of its instances.
#pragma once

#include <cstdint>

#include "core/base/common.hpp"
#include "core/base/team.hpp"

namespace uec {

// ---------------------------------------------------------------------------------------------
// Contract

// A source's turn: what its expert's instances still take after the sources before it.
struct Turn {
  uint32_t rest;       // tokens that its own rank has not kept
  uint32_t remaining;  // quotas of all instances; at least `rest`, below 2^31, not 0
  uint32_t ratio;      // rest / remaining in units of 2^-32, rounded down, and below 1
};

// Replaces the quotas of an expert's instances by cumulative shares: what `source` sends to an
// instance and those before it. First every rank uses the quota of its own instance; the rest
// follows in rank order, each source in proportion to what is left.
//
//   load   of the source
//   rank   [num_instances] ascending
//   quota  [num_instances] they sum to the load
//   turns  [G] scratch. `rest` is each rank's load: nothing is negative, the sum is below 2^31
//
// The team has synchronised since these were written. A member interleaves the turns of kAtOnce
// instances: within one instance each turn depends on the one before. It loads kTurns of them
// before it takes the first.
template <int32_t kAtOnce, int32_t kTurns, class Team>
UEC_HD inline void share_expert(const Team& team, int32_t load, int32_t source, const int32_t* rank,
                                int32_t num_instances, int32_t* quota, Turn* turns);

// ---------------------------------------------------------------------------------------------
// Implementation

// Field by field: a device would load a braced list of constants from memory.
UEC_HD inline Turn make_turn(uint32_t rest, uint32_t remaining) {
  Turn turn{rest, remaining, ~uint32_t{0}};
  if (rest == 0) {
    turn.remaining = 1;
    turn.ratio = 0;
  } else if (rest != remaining) {
    turn.ratio = static_cast<uint32_t>((uint64_t{rest} << 32) / remaining);
  }
  return turn;
}

// rest * quota / remaining, rounded down, for a quota of at most `remaining`. Without a division,
// because the turns form a dependent chain.
UEC_HD inline uint32_t part_of(const Turn& turn, uint32_t quota) {
  // The ratio is too small by at most 2^-32 and the quota below 2^31: the error is at most a half,
  // so the result is right or one too small. The remainder is below 2 * remaining: 32 bits hold it.
#if defined(__CUDA_ARCH__)
  const uint32_t part = __umulhi(quota, turn.ratio);
#else
  const auto part = static_cast<uint32_t>(uint64_t{quota} * turn.ratio >> 32);
#endif
  const uint32_t left = turn.rest * quota - part * turn.remaining;
  return part + (left >= turn.remaining ? 1 : 0);
}

template <int32_t kAtOnce, int32_t kTurns, class Team>
UEC_HD inline void share_expert(const Team& team, int32_t load, int32_t source, const int32_t* rank,
                                int32_t num_instances, int32_t* quota, Turn* turns) {
  // Locality first: a rank with an instance uses that quota for its own tokens.
  const Run own = Run::of(team, num_instances);
  uint32_t sum = 0;
  UEC_ROLLED
  for (int32_t i = own.begin; i < own.end; ++i) {
    Turn& turn = turns[rank[i]];
    const auto kept = static_cast<int32_t>(min64(turn.rest, quota[i]));
    turn.rest -= static_cast<uint32_t>(kept);
    sum += static_cast<uint32_t>(quota[i] -= kept);
  }
  uint32_t upto = team.exclusive_sum(sum);
  const uint32_t remaining = team.read_from(team.size() - 1, upto + sum);
  const uint32_t rest = turns[source].rest;
  const int32_t kept = load - static_cast<int32_t>(rest);

  if (rest > 0) {
    const Run sources = Run::of(team, source + 1);
    uint32_t given = 0;
    UEC_ROLLED
    for (int32_t r = sources.begin; r < sources.end; ++r) given += turns[r].rest;
    uint32_t left = remaining - team.exclusive_sum(given);
    UEC_ROLLED
    for (int32_t r = sources.begin; r < sources.end; ++r) {
      turns[r] = make_turn(turns[r].rest, left);
      left -= turns[r].rest;
    }
    team.sync();
  }
  // What a source leaves of the first i quotas depends on their sum alone, so every instance can go
  // through the turns independently. All members go round as often, also those without one.
  const auto most = static_cast<int32_t>(ceil_div(num_instances, team.size()));
  UEC_ROLLED
  for (int32_t first = 0; first < most; first += kAtOnce) {
    const int32_t i = own.begin + first, count = min32(kAtOnce, own.end - i);
    uint32_t left[kAtOnce] = {};
    for (int32_t k = 0; k < kAtOnce; ++k)
      if (k < count) left[k] = upto += static_cast<uint32_t>(quota[i + k]);
    if (rest > 0) {
      int32_t r = 0;
      UEC_ROLLED
      for (; r + kTurns <= source; r += kTurns) {
        Turn held[kTurns];
        for (int32_t k = 0; k < kTurns; ++k) held[k] = turns[r + k];
        team.sync();  // keeps a compiler from loading each where it is used
        for (const Turn& turn : held)
          for (uint32_t& sum : left) sum -= part_of(turn, sum);
      }
      UEC_ROLLED
      for (; r < source; ++r)
        for (uint32_t& sum : left) sum -= part_of(turns[r], sum);
      for (uint32_t& sum : left) sum = part_of(turns[source], sum);
    }
    for (int32_t k = 0; k < kAtOnce; ++k)
      if (k < count)
        quota[i + k] =
            static_cast<int32_t>(rest > 0 ? left[k] : 0) + (rank[i + k] >= source ? kept : 0);
  }
  team.sync();
}

}  // namespace uec
