// Routing -> counts: how many of this rank's tokens chose each expert.
#pragma once

#include "core/base/common.hpp"

namespace uec {

// Counts `ids` [num_ids] into `counts` [num_experts]; -1 is padding. Returns the position of the
// first out-of-range id, or -1.
template <class Id>
UEC_HD int64_t count_experts(const Id* ids, int64_t num_ids, int32_t num_experts, int32_t* counts) {
  for (int32_t e = 0; e < num_experts; ++e) counts[e] = 0;
  for (int64_t i = 0; i < num_ids; ++i) {
    if (ids[i] == -1) continue;
    if (ids[i] < 0 || ids[i] >= num_experts) return i;
    ++counts[ids[i]];
  }
  return -1;
}

}  // namespace uec
