// Whether a plan is legal on a topology. Both engines check this before they write anything.
#pragma once

#include "core/base/common.hpp"
#include "core/base/team.hpp"

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

namespace detail {

UEC_HD inline PlanFault slot_fault(const Topology& t, const int32_t* row, int32_t rank,
                                   int32_t slot) {
  const int32_t e = row[slot];
  if (e == -1) return PlanFault::kNone;
  if (e < -1 || e >= t.num_experts) return PlanFault::kOutOfRange;
  if (t.home[e] == rank) return PlanFault::kOnHome;
  if (!t.may_hold(e, rank)) return PlanFault::kOutOfDomain;
  for (int32_t other = 0; other < slot; ++other)
    if (row[other] == e) return PlanFault::kDuplicate;
  return PlanFault::kNone;
}

}  // namespace detail

// Returns the first fault by rank, then slot: the same for every member. Writes nothing.
template <class Team>
UEC_HD PlanCheck check_plan(Team team, const Topology& t, const int32_t* slot_expert) {
  const int32_t slots = t.slots_per_rank;
  uint32_t first = ~uint32_t{0};
  UEC_ROLLED
  for (int32_t r = team.index(); r < t.num_ranks && first == ~uint32_t{0}; r += team.size()) {
    const int32_t* row = slot_expert + static_cast<int64_t>(r) * slots;
    UEC_ROLLED
    for (int32_t i = 0; i < slots; ++i) {
      if (detail::slot_fault(t, row, r, i) == PlanFault::kNone) continue;
      first = static_cast<uint32_t>(r) * static_cast<uint32_t>(slots) + static_cast<uint32_t>(i);
      break;
    }
  }
  first = team.min_sync(first);
  PlanCheck check;
  if (first == ~uint32_t{0}) return check;
  const auto rank = static_cast<int32_t>(first / static_cast<uint32_t>(slots));
  const auto slot = static_cast<int32_t>(first % static_cast<uint32_t>(slots));
  const int32_t* row = slot_expert + static_cast<int64_t>(rank) * slots;
  check.fault = detail::slot_fault(t, row, rank, slot);
  check.rank = rank;
  check.slot = slot;
  check.expert = row[slot];
  return check;
}

}  // namespace uec
