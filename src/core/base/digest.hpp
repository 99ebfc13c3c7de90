// A 64-bit hash of what ranks must agree on. It guards against mistakes, not against attackers.
#pragma once

#include "core/base/common.hpp"
#include "core/base/team.hpp"

namespace uec {

// Mixes one word in: multiply and fold, the avalanche of a 64 x 64 -> 128 bit product.
UEC_HD inline uint64_t mix(uint64_t state, uint64_t word) {
  state = (state ^ word) * 0x9E3779B97F4A7C15ull;
  state ^= state >> 32;
  state *= 0xD6E8FEB86659FD93ull;
  return state ^ (state >> 29);
}

// Each pair of values is mixed with its position on its own, so the sum does not depend on the
// order of addition. A change of a single pair always changes the digest.
template <class Team>
UEC_HD_NOINLINE uint64_t digest_ints(Team team, uint64_t state, const int32_t* values,
                                     int64_t count) {
  constexpr uint64_t kPlace = 0xA24BAED4963EE407ull;  // odd: no two places are equal
  state = mix(state, static_cast<uint64_t>(count));
  uint64_t sum = 0;
  UEC_ROLLED
  for (int64_t i = team.index(); i < count / 2; i += team.size()) {
    const uint64_t pair = static_cast<uint32_t>(values[2 * i]) |
                          static_cast<uint64_t>(static_cast<uint32_t>(values[2 * i + 1])) << 32;
    sum += mix(state + static_cast<uint64_t>(i) * kPlace, pair);
  }
  if (count % 2 != 0 && team.leader())
    sum += mix(state + static_cast<uint64_t>(count / 2) * kPlace,
               static_cast<uint32_t>(values[count - 1]));
  return mix(state, team.sum(sum));
}

// Digests what a plan says beyond which expert is in which slot. Null: the plan lacks that array.
template <class Team>
UEC_HD uint64_t digest_quotas(Team team, const Topology& t, const int32_t* slot_quota,
                              const int32_t* home_quota) {
  uint64_t digest = 0;
  if (slot_quota != nullptr)
    digest = digest_ints(team, digest, slot_quota, int64_t{t.num_ranks} * t.slots_per_rank);
  if (home_quota != nullptr) digest = digest_ints(team, digest, home_quota, t.num_experts);
  return digest;
}

}  // namespace uec
