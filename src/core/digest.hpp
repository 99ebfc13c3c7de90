// A 64-bit hash of what ranks must agree on. It guards against mistakes, not against attackers.
#pragma once

#include "core/common.hpp"

namespace uec {

// Mixes one word in: multiply and fold, the avalanche of a 64 x 64 -> 128 bit product.
UEC_HD inline uint64_t mix(uint64_t state, uint64_t word) {
  state = (state ^ word) * 0x9E3779B97F4A7C15ull;
  state ^= state >> 32;
  state *= 0xD6E8FEB86659FD93ull;
  return state ^ (state >> 29);
}

UEC_HD inline uint64_t digest_ints(uint64_t state, const int32_t* values, int64_t count) {
  const auto pair = [values](int64_t i) {
    return static_cast<uint32_t>(values[i]) |
           static_cast<uint64_t>(static_cast<uint32_t>(values[i + 1])) << 32;
  };
  state = mix(state, static_cast<uint64_t>(count));
  int64_t i = 0;
  if (count >= 8) {  // four chains side by side: one waits for its own products
    uint64_t a = state, b = ~state, c = state + 1, d = state - 1;  // equal words, unequal chains
    for (; i + 7 < count; i += 8) {
      a = mix(a, pair(i));
      b = mix(b, pair(i + 2));
      c = mix(c, pair(i + 4));
      d = mix(d, pair(i + 6));
    }
    state = mix(mix(a, b), mix(c, d));
  }
  for (; i + 1 < count; i += 2) state = mix(state, pair(i));
  return i < count ? mix(state, static_cast<uint32_t>(values[i])) : state;
}

}  // namespace uec
