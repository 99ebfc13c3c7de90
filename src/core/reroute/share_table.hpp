// The shares of one source rank as a table in which any token can be looked up. A team makes the
// part of one expert, independently of all other teams. compute_shares() does the same for all
// experts in turn.
#pragma once

#include <cstdint>

#include "core/base/common.hpp"
#include "core/base/local_experts.hpp"
#include "core/base/team.hpp"
#include "core/reroute/reroute.hpp"
#include "core/reroute/shares.hpp"

namespace uec {

// ---------------------------------------------------------------------------------------------
// Contract

// The physical ids of a group's instances.
struct InstanceIds {
  int32_t per_rank = 0;              // P
  const int32_t* main_id = nullptr;  // [E] of the main instance
  const int32_t* slot_id = nullptr;  // [G] of a rank's first slot
};

struct ShareEntry {
  int32_t upto;  // tokens to this instance and those of lower rank
  int32_t physical_id;
};

// The instances of expert e are the entries begin[e] .. begin[e + 1] - 1, by ascending rank.
struct ShareTable {
  int32_t* begin;       // [E + 1]
  ShareEntry* entries;  // [E + G * S]
};

// A team's working memory.
struct ShareScratch {
  Turn* turns;     // [G]
  int32_t* rank;   // [G]
  int32_t* quota;  // [G]
};

// What compute_shares() and reroute_tokens() check for, in the order in which they check.
enum class FaultStage : uint64_t {
  kHome,        // expert
  kSlotExpert,  // position in slot_expert
  kSlotTwice,   // position in slot_expert
  kLoad,        // position in load
  kSums,        // three for each expert: its load, a quota of it, the quotas' sum
  kId,          // position in topk_ids
  kCount,       // expert
};

// A fault as a word. Of several, the largest is the one that the sequential code finds first. 0:
// none.
UEC_HD constexpr uint64_t fault_word(FaultStage stage, int64_t position) {
  return ~(static_cast<uint64_t>(stage) << 56 | static_cast<uint64_t>(position));
}
UEC_HD constexpr FaultStage fault_stage(uint64_t word) {
  return static_cast<FaultStage>(~word >> 56);
}
UEC_HD constexpr int64_t fault_position(uint64_t word) {
  return static_cast<int64_t>(~word & ((uint64_t{1} << 56) - 1));
}

// Writes the expert's part of the table. Returns the worst fault that this member has found; after
// a fault of any expert the table must not be used.
template <class Team>
UEC_HD inline uint64_t share_into_table(const Team& team, const Topology& topology,
                                        const InstanceIds& ids, const QuotaPlan& plan,
                                        int32_t source, int32_t expert, const ShareScratch& scratch,
                                        const ShareTable& table);

// What compute_shares() says of a fault that share_into_table() has found.
UEC_HD inline RerouteStatus explain_plan_fault(const Topology& topology, const QuotaPlan& plan,
                                               uint64_t word);

// The instance of an expert's token `ordinal`, counted from 0; -1 beyond its load.
UEC_HD inline int32_t find_instance(const int32_t* begin, const ShareEntry* entries, int32_t expert,
                                    int32_t ordinal);

// ---------------------------------------------------------------------------------------------
// Implementation

namespace share_table_detail {

// Loads that a member has in flight together.
inline constexpr int32_t kLoadsAtOnce = 4;

UEC_HD inline void keep_worst(uint64_t* worst, FaultStage stage, int64_t position) {
  const uint64_t word = fault_word(stage, position);
  if (word > *worst) *worst = word;
}

// A slot of all, its rank, and its index there. Walked, because a division takes as long as a trip
// to shared memory and more.
struct SlotWalk {
  int32_t at, rank, idx;

  UEC_HD SlotWalk(int32_t at, int32_t slots)
      : at(at), rank(slots == 0 ? 0 : at / slots), idx(at - rank * slots) {}
  UEC_HD void step(int32_t slots) {
    ++at;
    if (++idx < slots) return;
    idx = 0;
    ++rank;
  }
};

// Whether an earlier slot of the same rank has the same expert.
UEC_HD inline bool repeats_slot(const QuotaPlan& plan, const SlotWalk& slot, int32_t expert) {
  UEC_ROLLED
  for (int32_t i = slot.at - slot.idx; i < slot.at; ++i)
    if (plan.slot_expert[i] == expert) return true;
  return false;
}

// Visits the expert's quotas as compute_shares() does, until visit() returns false.
template <class Visit>
UEC_HD void visit_quotas(const Topology& topology, const QuotaPlan& plan, int32_t expert,
                         Visit&& visit) {
  const int32_t slots = topology.slots_per_rank;
  UEC_ROLLED
  for (int32_t r = 0; r < topology.num_ranks; ++r) {
    if (topology.home[expert] == r && !visit(plan.home_quota[expert])) return;
    UEC_ROLLED
    for (int32_t i = r * slots; i < (r + 1) * slots; ++i)
      if (plan.slot_expert[i] == expert && !visit(plan.slot_quota[i])) return;
  }
}

}  // namespace share_table_detail

template <class Team>
UEC_HD inline uint64_t share_into_table(const Team& team, const Topology& topology,
                                        const InstanceIds& ids, const QuotaPlan& plan,
                                        int32_t source, int32_t expert, const ShareScratch& scratch,
                                        const ShareTable& table) {
  using namespace share_table_detail;
  const int32_t num_ranks = topology.num_ranks, num_experts = topology.num_experts;
  const int32_t slots = topology.slots_per_rank;
  // All loads are issued before the first sum, and as many as possible before anything waits: on a
  // device each round trip to memory takes as long as a hundred instructions.
  const int32_t* const load = plan.load + expert;
  const auto load_of = [&](int32_t r) { return load[static_cast<int64_t>(r) * num_experts]; };
  const int32_t home = topology.home[expert];
  const int32_t planned_home = plan.home == nullptr ? home : plan.home[expert];
  const int32_t home_quota = plan.home_quota[expert], main_id = ids.main_id[expert];
  const int32_t own_load = load_of(source);
  int32_t loaded[kLoadsAtOnce];
  const auto load_column = [&](int32_t first) {
    for (int32_t k = 0; k < kLoadsAtOnce; ++k) {
      const int32_t r = first + k * team.size();
      loaded[k] = r < num_ranks ? load_of(r) : 0;
    }
  };
  load_column(team.index());

  // Replicas of lower experts, of this one, and of this one on ranks before its home.
  uint64_t worst = 0, lower = 0, replicas = 0, ahead = 0;
  int32_t first_quota = 0, first_id = 0;  // of the member's first replica
  const Run own = Run::of(team, num_ranks * slots);
  const SlotWalk first(own.begin, slots);
  SlotWalk slot = first;
  UEC_ROLLED
  for (int32_t begin = own.begin; begin < own.end; begin += kLoadsAtOnce) {
    int32_t held[kLoadsAtOnce];
    for (int32_t k = 0; k < kLoadsAtOnce; ++k)
      held[k] = begin + k < own.end ? plan.slot_expert[begin + k] : -1;
    uint32_t its = 0;  // a bit for each that is of this expert
    for (int32_t k = 0; k < kLoadsAtOnce; ++k) {
      its |= static_cast<uint32_t>(held[k] == expert) << k;
      lower += held[k] >= 0 && held[k] < expert;
      if (held[k] < -1 || held[k] >= num_experts)
        keep_worst(&worst, FaultStage::kSlotExpert, begin + k);
    }
    UEC_ROLLED
    for (; its != 0; slot.step(slots), its >>= 1) {
      if ((its & 1) == 0) continue;
      if (replicas++ == 0) {
        first_quota = plan.slot_quota[slot.at];
        first_id = ids.slot_id[slot.rank];
      }
      if (slot.rank < home) ++ahead;
      if (slot.rank == home || repeats_slot(plan, slot, expert))
        keep_worst(&worst, FaultStage::kSlotTwice, slot.at);
    }
    UEC_ROLLED
    while (slot.at < begin + kLoadsAtOnce) slot.step(slots);
  }
  int64_t loads = 0;
  for (int32_t first = team.index(); first < num_ranks;) {
    for (int32_t k = 0; k < kLoadsAtOnce; ++k) {
      const int32_t r = first + k * team.size();
      if (r >= num_ranks) break;
      scratch.turns[r].rest = static_cast<uint32_t>(loaded[k]);
      loads += loaded[k];
      if (loaded[k] < 0)
        keep_worst(&worst, FaultStage::kLoad, static_cast<int64_t>(r) * num_experts + expert);
    }
    first += kLoadsAtOnce * team.size();
    if (first < num_ranks) load_column(first);
  }
  if (team.leader() && planned_home != home) keep_worst(&worst, FaultStage::kHome, expert);

  constexpr int32_t kBits = 21;  // three counts of slots in a word
  constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;
  const uint64_t counts = (lower << kBits | replicas) << kBits | ahead;
  const uint64_t before = team.exclusive_sum(counts);
  const uint64_t all = team.read_from(team.size() - 1, before + counts);
  const auto begin = expert + static_cast<int32_t>(all >> 2 * kBits);
  const auto num_instances = 1 + static_cast<int32_t>(all >> kBits & kMask);
  const auto main_at = static_cast<int32_t>(all & kMask);
  if (team.leader()) {
    table.begin[expert] = begin;
    if (expert == num_experts - 1) table.begin[num_experts] = begin + num_instances;
  }
  if (num_instances > num_ranks) return worst;  // some rank holds it twice

  // The instances, by rank.
  if (team.leader()) {
    scratch.rank[main_at] = home;
    scratch.quota[main_at] = home_quota;
    table.entries[begin + main_at].physical_id = main_id;
  }
  auto at = static_cast<int32_t>(before >> kBits & kMask);
  uint64_t listed = 0;
  slot = first;
  UEC_ROLLED
  for (; listed < replicas; slot.step(slots)) {
    if (plan.slot_expert[slot.at] != expert) continue;
    const bool is_first = listed++ == 0;
    const int32_t place = at++ + (slot.rank < home ? 0 : 1);
    scratch.rank[place] = slot.rank;
    scratch.quota[place] = is_first ? first_quota : plan.slot_quota[slot.at];
    table.entries[begin + place].physical_id =
        (is_first ? first_id : ids.slot_id[slot.rank]) + slot.idx;
  }
  team.sync();

  // What the shares depend on.
  int64_t quotas = 0;
  UEC_ROLLED
  for (int32_t i = team.index(); i < num_instances; i += team.size()) {
    quotas += scratch.quota[i];
    if (scratch.quota[i] < 0) keep_worst(&worst, FaultStage::kSums, int64_t{3} * expert + 1);
  }
  const auto total_load = static_cast<int64_t>(team.sum(static_cast<uint64_t>(loads)));
  const auto total_quota = static_cast<int64_t>(team.sum(static_cast<uint64_t>(quotas)));
  if (total_load > kMaxLoad) keep_worst(&worst, FaultStage::kSums, int64_t{3} * expert);
  if (total_quota != total_load) keep_worst(&worst, FaultStage::kSums, int64_t{3} * expert + 2);
  if (team.min_sync(worst == 0 ? 1 : 0) == 0) return worst;

  if (num_instances == 1) {
    if (team.leader()) table.entries[begin].upto = own_load;
    return worst;
  }
  // Seven turns: nine times seven are those before the last of 64 ranks.
  share_expert<1, 7>(team, own_load, source, scratch.rank, num_instances, scratch.quota,
                     scratch.turns);
  UEC_ROLLED
  for (int32_t i = team.index(); i < num_instances; i += team.size())
    table.entries[begin + i].upto = scratch.quota[i];
  return worst;
}

UEC_HD inline RerouteStatus explain_plan_fault(const Topology& topology, const QuotaPlan& plan,
                                               uint64_t word) {
  using namespace share_table_detail;
  const int64_t position = fault_position(word);
  RerouteStatus status;
  switch (fault_stage(word)) {
    case FaultStage::kHome:
      status.fault = RerouteFault::kOtherHome;
      status.expert = static_cast<int32_t>(position);
      status.value = plan.home[position];
      return status;
    case FaultStage::kSlotExpert:
    case FaultStage::kSlotTwice:
      status.fault = RerouteFault::kBadSlot;
      status.position = position;
      status.value = plan.slot_expert[position];
      return status;
    case FaultStage::kLoad:
      status.fault = RerouteFault::kBadCount;
      status.expert = static_cast<int32_t>(position % topology.num_experts);
      status.value = plan.load[position];
      return status;
    default:
      break;
  }
  const auto expert = static_cast<int32_t>(position / 3);
  int64_t loads = 0, quotas = 0;
  UEC_ROLLED
  for (int32_t r = 0; r < topology.num_ranks; ++r)
    loads += plan.load[static_cast<int64_t>(r) * topology.num_experts + expert];
  status.fault = RerouteFault::kBadCount;
  status.expert = expert;
  status.value = loads;
  if (position % 3 == 0) return status;
  visit_quotas(topology, plan, expert, [&](int32_t quota) {
    quotas += quota;
    status.value = quota;
    return quota >= 0;
  });
  if (position % 3 == 1) return status;
  status.fault = RerouteFault::kQuotaMismatch;
  status.counted = quotas;
  status.expected = loads;
  status.value = -1;
  return status;
}

UEC_HD inline int32_t find_instance(const int32_t* begin, const ShareEntry* entries, int32_t expert,
                                    int32_t ordinal) {
  const int32_t end = begin[expert + 1];
  int32_t first = begin[expert];  // everything before it is used up by then
  for (int32_t count = end - first; count > 0;) {
    const int32_t half = count / 2;
    if (entries[first + half].upto > ordinal) {
      count = half;
    } else {
      first += half + 1;
      count -= half + 1;
    }
  }
  return first < end ? entries[first].physical_id : -1;
}

}  // namespace uec
