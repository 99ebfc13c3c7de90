// What the slots of a bank hold: a function of the calls that were made, and so the same on every
// rank, host and device.
//
// A resident is an expert that a slot holds since an earlier call, bit for bit as its home has it,
// in all segments that the bank's calls transfer. The table goes into each call's digest, so that
// ranks that differ (one has invalidated its bank, or makes other calls) fail before a byte moves.
#pragma once

#include <cstdint>

#include "core/base/common.hpp"
#include "core/base/team.hpp"

namespace uec {

struct BankTable {
  uint64_t version = 0;         // of the weights
  uint64_t segments = 0;        // bit i: segment i is in the slots
  int32_t* resident = nullptr;  // [G][S] -1: nothing
};

// The functions below are run by a team, as those of schedule.hpp are; the leader writes scalars.

template <class Team>
UEC_HD_NOINLINE void clear_residents(Team team, const Topology& t, int32_t* resident) {
  const int32_t slots = t.num_ranks * t.slots_per_rank;
  UEC_ROLLED
  for (int32_t at = team.index(); at < slots; at += team.size()) resident[at] = -1;
  team.sync();
}

// Called before a transfer of these weights is prepared. Rule: what was copied of another version,
// or in other segments, is not there: it is neither left in place nor sent on.
template <class Team>
UEC_HD void expire_residents(Team team, const Topology& t, uint64_t version, uint64_t segments,
                             BankTable& table) {
  const bool same = table.version == version && table.segments == segments;
  team.sync();  // all have looked
  if (same) return;
  if (team.leader()) {
    table.version = version;
    table.segments = segments;
  }
  clear_residents(team, t, table.resident);
}

// Called after a transfer has been prepared: every slot of its plan then holds its expert. A rank
// has one resident of an expert: what another slot, which the plan leaves alone, holds of it is
// forgotten.
template <class Team>
UEC_HD void note_residents(Team team, const Topology& t, const int32_t* slot_expert,
                           const BankTable& table) {
  const int32_t slots = t.slots_per_rank;
  UEC_ROLLED
  for (int32_t r = team.index(); r < t.num_ranks; r += team.size()) {
    const int32_t* const planned = slot_expert + r * slots;
    int32_t* const resident = table.resident + r * slots;
    UEC_ROLLED
    for (int32_t i = 0; i < slots; ++i) {
      const int32_t expert = planned[i];
      UEC_ROLLED
      for (int32_t other = 0; other < slots && expert >= 0; ++other)
        if (planned[other] < 0 && resident[other] == expert) resident[other] = -1;
      if (expert >= 0) resident[i] = expert;
    }
  }
  team.sync();
}

}  // namespace uec
