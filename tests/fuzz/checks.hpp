// What a plan may be, said a second time, and without the core's words for it.
#pragma once

#include <set>

#include "core/plan/check.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"

namespace fuzz {

// By rank, then slot; of one slot the first rule that it breaks in the order of PlanFault, but that
// the domain comes before the duplicate.
inline uec::PlanCheck first_fault(const PlanCase& c) {
  using uec::PlanFault;
  for (int32_t r = 0; r < c.num_ranks; ++r) {
    std::set<int32_t> held;
    for (int32_t slot = 0; slot < c.slots_per_rank; ++slot) {
      const int32_t e = c.slot_expert[r * c.slots_per_rank + slot];
      if (e == -1) continue;
      PlanFault fault = PlanFault::kNone;
      if (e < 0 || e >= c.num_experts)
        fault = PlanFault::kOutOfRange;
      else if (c.home[e] == r)
        fault = PlanFault::kOnHome;
      else if (!c.allow_cross_domain && c.domain[c.home[e]] != c.domain[r])
        fault = PlanFault::kOutOfDomain;
      else if (!held.insert(e).second)
        fault = PlanFault::kDuplicate;
      if (fault != PlanFault::kNone) return {fault, r, slot, e};
    }
  }
  return {};
}

// The core finds the same fault, or none.
inline uec::PlanFault check_validate(const PlanCase& c) {
  const uec::PlanCheck expected = first_fault(c);
  const uec::PlanCheck found =
      uec::check_plan(uec::SingleThread{}, c.topology(), c.slot_expert.data());
  CHECK_EQ(static_cast<int32_t>(found.fault), static_cast<int32_t>(expected.fault));
  CHECK_EQ(found.rank, expected.rank);
  CHECK_EQ(found.slot, expected.slot);
  CHECK_EQ(found.expert, expected.expert);
  return found.fault;
}

}  // namespace fuzz
