// What the planner and the reroute share: the local experts of every rank, and the largest load.
#pragma once

#include <cstdint>

#include "core/base/common.hpp"

namespace uec {

// Tokens of one expert over all source ranks: a product of two loads then fits 64 bits.
inline constexpr int64_t kMaxLoad = (int64_t{1} << 31) - 1;

// Groups the experts by home: rank r's local experts are entries begin[r] .. begin[r + 1] - 1 of
// `expert`, in ascending order. Returns the largest number of local experts on a rank.
//
// Arrays: begin [G + 1], expert [E]; both are written in full.
UEC_HD inline int32_t group_local_experts(const Topology& topology, int32_t* begin,
                                          int32_t* expert) {
  const int32_t num_ranks = topology.num_ranks;
  for (int32_t r = 0; r <= num_ranks; ++r) begin[r] = 0;
  for (int32_t e = 0; e < topology.num_experts; ++e) ++begin[topology.home[e] + 1];
  int32_t max_local_experts = 0;
  for (int32_t r = 0; r < num_ranks; ++r) {
    if (begin[r + 1] > max_local_experts) max_local_experts = begin[r + 1];
    begin[r + 1] += begin[r];
  }
  // Each begin[r] serves as the write cursor of its rank and ends at begin[r + 1] ...
  for (int32_t e = 0; e < topology.num_experts; ++e) expert[begin[topology.home[e]]++] = e;
  // ... so a shift by one restores the starts.
  for (int32_t r = num_ranks; r > 0; --r) begin[r] = begin[r - 1];
  begin[0] = 0;
  return max_local_experts;
}

}  // namespace uec
