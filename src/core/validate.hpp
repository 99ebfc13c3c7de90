// Whether a plan is legal on a topology. Both engines ask this before anything is written.
#pragma once

#include "core/common.hpp"

namespace uec {

enum class PlanFault : int32_t {
  kNone = 0,
  kOutOfRange,   // not an expert, nor -1
  kOnHome,       // a replica on its own home rank
  kDuplicate,    // twice on one rank
  kOutOfDomain,  // outside the home's domain
};

struct PlanCheck {
  PlanFault fault = PlanFault::kNone;
  int32_t rank = -1, slot = -1, expert = -1;
};

UEC_HD inline PlanCheck check_plan(const Topology& t, const int32_t* slot_expert) {
  for (int32_t r = 0; r < t.num_ranks; ++r) {
    const int32_t* row = slot_expert + static_cast<int64_t>(r) * t.slots_per_rank;
    for (int32_t i = 0; i < t.slots_per_rank; ++i) {
      const int32_t e = row[i];
      if (e == -1) continue;
      if (e < -1 || e >= t.num_experts) return {PlanFault::kOutOfRange, r, i, e};
      if (t.home[e] == r) return {PlanFault::kOnHome, r, i, e};
      if (!t.may_hold(e, r)) return {PlanFault::kOutOfDomain, r, i, e};
      for (int32_t j = 0; j < i; ++j)
        if (row[j] == e) return {PlanFault::kDuplicate, r, i, e};
    }
  }
  return {};
}

}  // namespace uec
